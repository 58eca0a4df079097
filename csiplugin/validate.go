package csiplugin

import (
	"context"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// ValidateVolumeCapabilities confirms what a volume can be used for. What it cannot is an answer with a reason and no
// error; a request that makes no sense is ErrInvalidArgument. It takes no lock because it changes nothing.
func (c *controller) ValidateVolumeCapabilities(_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if req.GetVolumeId() != "" && len(req.GetVolumeCapabilities()) == 0 {
		return nil, invalid("volume_capabilities is missing")
	}
	v, _, err := c.look(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	var reason error
	for i, asked := range req.GetVolumeCapabilities() {
		parsed, err := parseCapability(asked)
		if err != nil {
			return nil, err
		}
		if _, err := parsed.of(v); err != nil && reason == nil {
			reason = fmt.Errorf("volume_capabilities[%d]: %w", i, err)
		}
	}
	if reason == nil {
		reason = checkContext(v, req.GetVolumeContext())
	}
	var asked createRequest
	if reason == nil {
		_, reason = asked.parseParameters(req.GetParameters())
	}
	if reason == nil && len(req.GetParameters()) > 0 && !maps.Equal(asked.parameters, v.Parameters) {
		reason = fmt.Errorf("the volume has the parameters %v", v.Parameters)
	}
	if reason == nil {
		reason = checkMutable(req.GetMutableParameters())
	}
	for key, value := range req.GetMutableParameters() {
		if reason == nil && v.Mutable[key] != value {
			reason = fmt.Errorf("mutable_parameters: %s is %q", key, v.Mutable[key])
		}
	}
	if reason != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: reason.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
		MutableParameters:  req.GetMutableParameters(),
	}}, nil
}
