package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// CreateVolume makes a volume: an empty one, or one with the content of a volume or a snapshot. Asked again with the same
// name it returns the volume if that is what is asked for, and ErrAlreadyExists otherwise.
func (c *controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, err := parseCreate(req)
	if err != nil {
		return nil, err
	}
	v, err := findOrMake(ctx, c.store, "volume name "+want.name, want, c.existing, c.create)
	if err != nil {
		return nil, err
	}
	described := c.described(v)
	if want.image != nil {
		described.ContentSource = req.GetVolumeContentSource() // the caller knows what the record does not keep
	}
	return &csi.CreateVolumeResponse{Volume: described}, nil
}

// described is a volume as CSI describes it.
func (c *controller) described(v catalog.Volume) *csi.Volume {
	return &csi.Volume{
		VolumeId: v.ID.String(), CapacityBytes: v.Size, VolumeContext: volumeContext(v),
		ContentSource: contentSource(v.Source), AccessibleTopology: []*csi.Topology{c.topology()},
	}
}

// existing returns the volume of the name if it is what is wanted. ErrNotFound if there is none.
func (c *controller) existing(ctx context.Context, want createRequest) (catalog.Volume, error) {
	v, err := c.catalog.VolumeNamed(want.name)
	if err != nil {
		return v, err
	}
	if settledVolume(v) {
		return v, c.matches(v, want)
	}
	release, err := c.lock(v.ID)
	if err != nil {
		return v, err
	}
	defer release()
	if v, err = c.settled(ctx, v.ID); err != nil {
		return v, err
	}
	return v, c.matches(v, want)
}

// matches is ErrAlreadyExists if a volume of the wanted name is not what is wanted.
func (c *controller) matches(v catalog.Volume, want createRequest) error {
	if err := compare(v, want); err != nil {
		return alreadyExists("volume %s has the name %q and is another one: %v", v.ID, want.name, err)
	}
	if err := c.reachable(want.topology); err != nil {
		return alreadyExists("volume %s has the name %q and is elsewhere: %v", v.ID, want.name, err)
	}
	return nil
}

// compare returns nil if a volume is compatible with a request for one of its name (CSI, CreateVolume), and otherwise an
// error without a kind.
func compare(v catalog.Volume, want createRequest) error {
	required, limit := want.capacity.GetRequiredBytes(), want.capacity.GetLimitBytes()
	switch source := want.sourceText(); {
	case v.Source != source && v.Source == "":
		return fmt.Errorf("it was made empty")
	case v.Source != source:
		return fmt.Errorf("it was made from %s", v.Source)
	case v.Size < required || limit > 0 && v.Size > limit:
		return fmt.Errorf("it has %d bytes", v.Size)
	case !maps.Equal(v.Parameters, want.parameters):
		return fmt.Errorf("it has the parameters %v", v.Parameters)
	case want.fsType != "" && !want.defaulted && want.fsType != v.FSType:
		return fmt.Errorf("it was created for filesystem %q", v.FSType)
	}
	for key, value := range want.mutable {
		if v.Mutable[key] != value {
			return fmt.Errorf("its %s is %q", key, v.Mutable[key])
		}
	}
	for _, capability := range want.caps {
		if _, err := capability.of(v); err != nil {
			return err
		}
	}
	return nil
}

// sourceText is what a record says of a source: nothing for the zero handle.
func sourceText(source handle.Handle) string {
	if source == (handle.Handle{}) {
		return ""
	}
	return source.String()
}

// create makes a new volume, or leaves nothing behind.
func (c *controller) create(ctx context.Context, want createRequest) (catalog.Volume, error) {
	if err := c.reachable(want.topology); err != nil {
		return catalog.Volume{}, fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	from, err := c.from(ctx, want)
	if err != nil {
		return catalog.Volume{}, err
	}
	defer from.release()
	v, err := c.planVolume(ctx, want, from)
	if err != nil {
		return v, err
	}
	release, err := c.lock(v.ID)
	if err != nil {
		return v, err
	}
	defer release()
	if err := c.catalog.Reserve(); err != nil {
		return v, err
	}
	if err := c.catalog.PutVolume(v); err != nil {
		return v, err
	}
	crashpoint.At(ctx, "creation intended")
	made, err := c.make(ctx, v, from)
	if err != nil {
		undo, cancel := undoContext(ctx)
		defer cancel()
		return v, errors.Join(err, c.remove(undo, v))
	}
	return made, nil
}

// planVolume is the volume that is to be made.
func (c *controller) planVolume(ctx context.Context, want createRequest, from origin) (catalog.Volume, error) {
	v := catalog.Volume{
		ID: handle.NewVolume(c.pool), Name: want.name, State: catalog.Creating,
		FSType: want.fsType, Block: want.block, Parameters: want.parameters, Mutable: want.mutable,
		Source: want.sourceText(), Created: time.Now().UTC(),
	}
	if from.fsType != "" && v.FSType != "" && v.FSType != from.fsType {
		if !want.defaulted {
			return v, invalid("%s holds %s, and a volume for %s cannot be made from it; ask for %s", v.Source, from.fsType, v.FSType, from.fsType)
		}
		v.FSType = from.fsType
	}
	l, err := c.limits(ctx, v.FSType)
	if err != nil {
		return v, err
	}
	v.Size, err = planCloneSize(want.capacity, l, from.size)
	return v, err
}

func (c *controller) make(ctx context.Context, v catalog.Volume, from origin) (catalog.Volume, error) {
	note, err := volumeLabel(v)
	if err != nil {
		return v, err
	}
	if v.Source == "" {
		err = c.engine.Create(ctx, object(v.ID), v.Size, note)
	} else if err = from.settle(ctx); err == nil {
		err = c.engine.Clone(ctx, from.object, object(v.ID), v.Size, note)
	}
	if err != nil {
		return v, err
	}
	crashpoint.At(ctx, "data made")
	v.State = catalog.Ready
	if err := c.catalog.PutVolume(v); err != nil {
		return v, err
	}
	crashpoint.At(ctx, "creation recorded")
	return v, nil
}

// undoTimeout is how long undoing may take after the call that it belongs to has ended.
const undoTimeout = 30 * time.Second

func undoContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
}
