package csiplugin

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// GetCapacity reports what can still be written in the pool. Volumes are thin: they may be promised more. For volumes that
// this plugin cannot make, and elsewhere than here, it is nothing.
func (c *controller) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	var asked createRequest
	fsType, err := asked.parseParameters(req.GetParameters())
	if err != nil {
		return nil, err
	}
	possible := req.GetAccessibleTopology() == nil || c.isHere(req.GetAccessibleTopology())
	for i, vc := range req.GetVolumeCapabilities() {
		parsed, err := parseCapability(vc)
		if err != nil {
			return nil, fmt.Errorf("volume_capabilities[%d]: %w", i, err)
		}
		possible = possible && parsed.supported() == nil
	}
	if possible && len(req.GetVolumeCapabilities()) > 0 {
		if err := asked.parseCapabilities(req.GetVolumeCapabilities(), fsType); err != nil {
			return nil, err
		}
	}
	if !possible {
		return &csi.GetCapacityResponse{}, nil
	}
	space, err := c.engine.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	l, err := c.limits(ctx, asked.fsType)
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: space.Free,
		MaximumVolumeSize: wrapperspb.Int64(l.largest),
		MinimumVolumeSize: wrapperspb.Int64(l.smallest),
	}, nil
}
