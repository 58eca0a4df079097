package csiplugin

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/protocol/rpc/crashpoint"
)

// ControllerExpandVolume makes a volume's data larger, whether it is in use or not. The node has to follow in every case:
// a filesystem has to grow, and a loop device has to notice.
func (c *controller) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	v, release, err := c.enter(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	if asked := req.GetVolumeCapability(); asked != nil {
		parsed, err := parseCapability(asked)
		if err != nil {
			return nil, err
		}
		if _, err := parsed.of(v); err != nil {
			return nil, invalid("%v", err)
		}
	}
	l, err := c.limits(ctx, v.FSType)
	if err != nil {
		return nil, err
	}
	size, err := planExpansion(req.GetCapacityRange(), v.Size, l)
	if err != nil {
		return nil, err
	}
	if size > v.Size {
		if err := c.catalog.Reserve(); err != nil {
			return nil, err
		}
		v.Expanding = size
		if err := c.catalog.PutVolume(v); err != nil {
			return nil, err
		}
		crashpoint.At(ctx, "expansion intended")
		if v, err = c.expand(ctx, v); err != nil {
			return nil, err
		}
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Size, NodeExpansionRequired: true}, nil
}
