package csiplugin

import (
	"context"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// ParameterDiscard is the mutable parameter that says when space comes back that a filesystem has freed: "online" has every
// mount discard at once what is freed (mount option discard), "none" leaves it to fstrim. Without it mounts are as the
// volume_capability says. It counts from the next publish on.
const ParameterDiscard = "crust.dev/discard"

// The values of ParameterDiscard.
const (
	discardOnline = "online"
	discardNone   = "none"
)

// checkMutable checks mutable_parameters. Errors are ErrInvalidArgument.
func checkMutable(parameters map[string]string) error {
	for key, value := range parameters {
		if key != ParameterDiscard {
			return invalid("mutable_parameters: %.64q is not one of this driver's; it has %s", key, ParameterDiscard)
		}
		if value != discardOnline && value != discardNone {
			return invalid("mutable_parameters: %s is %.64q; want %s or %s", key, value, discardOnline, discardNone)
		}
	}
	return nil
}

// ControllerModifyVolume changes the mutable parameters that are given and leaves the others as they are.
func (c *controller) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	v, release, err := c.enter(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	if err := checkMutable(req.GetMutableParameters()); err != nil {
		return nil, err
	}
	changed := maps.Clone(v.Mutable)
	if changed == nil {
		changed = map[string]string{}
	}
	maps.Copy(changed, req.GetMutableParameters())
	if maps.Equal(changed, v.Mutable) {
		return &csi.ControllerModifyVolumeResponse{}, nil
	}
	if err := c.catalog.Reserve(); err != nil {
		return nil, err
	}
	v.Mutable = changed
	note, err := volumeLabel(v)
	if err != nil {
		return nil, err
	}
	// The catalog is what counts, so it comes last: a call that dies before is repeated.
	if err := c.engine.SetLabel(ctx, object(v.ID), note); err != nil {
		return nil, err
	}
	crashpoint.At(ctx, "label changed")
	if err := c.catalog.PutVolume(v); err != nil {
		return nil, err
	}
	crashpoint.At(ctx, "modification recorded")
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// mountFlags are those of a publish: the user's, and what the volume's discard policy adds unless they say something
// about it themselves.
func mountFlags(p catalog.Publish, flags []string) []string {
	if !p.Discard || slices.Contains(flags, "discard") || slices.Contains(flags, "nodiscard") {
		return flags
	}
	return append(slices.Clone(flags), "discard")
}
