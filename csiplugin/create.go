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

// CreateVolume makes an empty volume. Asked again with the same name it returns the volume if that is what is asked for,
// and ErrAlreadyExists otherwise.
func (c *controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, err := parseCreate(req)
	if err != nil {
		return nil, err
	}
	release, err := c.locks.try("volume name " + want.name)
	if err != nil {
		return nil, err
	}
	defer release()
	v, err := c.existing(ctx, want)
	if errors.Is(err, errdefs.ErrNotFound) {
		v, err = c.create(ctx, want)
	}
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId: v.ID.String(), CapacityBytes: v.Size, VolumeContext: volumeContext(v),
		AccessibleTopology: []*csi.Topology{c.topology()},
	}}, nil
}

// existing returns the volume of the name if it is what is wanted. ErrNotFound if there is none.
func (c *controller) existing(ctx context.Context, want createRequest) (catalog.Volume, error) {
	v, err := c.catalog.VolumeNamed(want.name)
	if err != nil {
		return v, err
	}
	release, err := c.lock(v.ID)
	if err != nil {
		return v, err
	}
	defer release()
	if v, err = c.settled(ctx, v.ID); err != nil {
		return v, err
	}
	if err := compare(v, want); err != nil {
		return v, alreadyExists("volume %s has the name %q and is another one: %v", v.ID, want.name, err)
	}
	if err := c.reachable(want.topology); err != nil {
		return v, alreadyExists("volume %s has the name %q and is elsewhere: %v", v.ID, want.name, err)
	}
	return v, nil
}

// compare returns nil if a volume is compatible with a request for one of its name (CSI, CreateVolume), and otherwise an
// error without a kind.
func compare(v catalog.Volume, want createRequest) error {
	required, limit := want.capacity.GetRequiredBytes(), want.capacity.GetLimitBytes()
	switch {
	case v.Source != "":
		return fmt.Errorf("it was made from %s", v.Source)
	case v.Size < required || limit > 0 && v.Size > limit:
		return fmt.Errorf("it has %d bytes", v.Size)
	case !maps.Equal(v.Parameters, want.parameters):
		return fmt.Errorf("it has the parameters %v", v.Parameters)
	case want.fsType != "" && want.fsType != v.FSType:
		return fmt.Errorf("it was created for filesystem %q", v.FSType)
	}
	for _, capability := range want.caps {
		if _, err := capability.of(v); err != nil {
			return err
		}
	}
	return nil
}

// create makes a new volume, or leaves nothing behind.
func (c *controller) create(ctx context.Context, want createRequest) (catalog.Volume, error) {
	v, err := c.planVolume(ctx, want)
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
	made, err := c.make(ctx, v)
	if err != nil {
		undo, cancel := undoContext(ctx)
		defer cancel()
		return v, errors.Join(err, c.remove(undo, v))
	}
	return made, nil
}

// planVolume is the volume that is to be made.
func (c *controller) planVolume(ctx context.Context, want createRequest) (catalog.Volume, error) {
	if err := c.reachable(want.topology); err != nil {
		return catalog.Volume{}, fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	l, err := c.limits(ctx, want.fsType)
	if err != nil {
		return catalog.Volume{}, err
	}
	size, err := planSize(want.capacity, l)
	if err != nil {
		return catalog.Volume{}, err
	}
	return catalog.Volume{
		ID: handle.NewVolume(c.pool), Name: want.name, State: catalog.Creating, Size: size,
		FSType: want.fsType, Block: want.block, Parameters: want.parameters, Created: time.Now().UTC(),
	}, nil
}

func (c *controller) make(ctx context.Context, v catalog.Volume) (catalog.Volume, error) {
	if err := c.engine.Create(ctx, object(v.ID), v.Size); err != nil {
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
