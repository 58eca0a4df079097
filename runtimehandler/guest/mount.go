package guest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/device"
	"crust.dev/crust/runtimehandler/guest/filesystem"
	"crust.dev/crust/runtimehandler/guest/ownership"
)

// MountVolume is that of the API. A crash, or an end of ctx, at any point leaves a device that another MountVolume can
// take further: before and after mkfs with the same format policy, in the middle of it with UNFINISHED_FORMAT.
func (a *Agent) MountVolume(ctx context.Context, req *guestv1.MountVolumeRequest) (*guestv1.MountVolumeResponse, error) {
	options, err := checkMount(req)
	if err != nil {
		return nil, err
	}
	v, release, err := a.acquire(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	if v.mount != nil {
		return v.mountedAlready(req)
	}
	if err := a.reserve(req.GetSerial(), v.path); err != nil {
		return nil, fmt.Errorf("volume %s: %w", req.GetSerial(), err)
	}
	m, err := a.mount(ctx, req, options)
	if err != nil {
		a.unreserve(req.GetSerial())
		return nil, fmt.Errorf("volume %s: %w", req.GetSerial(), err)
	}
	a.setMount(v, m)
	return m.response, nil
}

// mountedAlready answers a request for a mount path that is taken. On what grounds it was formatted, and how large the
// device was to be, is history by now and not compared.
func (v *volume) mountedAlready(req *guestv1.MountVolumeRequest) (*guestv1.MountVolumeResponse, error) {
	old := v.mount.request
	same := old.GetSerial() == req.GetSerial() && old.GetFsType() == req.GetFsType() &&
		slices.Equal(old.GetMountFlags(), req.GetMountFlags()) && old.GetReadOnly() == req.GetReadOnly() &&
		(old.SupplementalGroup == nil) == (req.SupplementalGroup == nil) && old.GetSupplementalGroup() == req.GetSupplementalGroup() &&
		old.GetSupplementalGroupChangePolicy() == req.GetSupplementalGroupChangePolicy()
	switch {
	case !same:
		return nil, fmt.Errorf("volume %s is mounted at %s in another way; unmount it first: %w", old.GetSerial(), v.path, errdefs.ErrAlreadyExists)
	case v.leaving:
		return nil, fmt.Errorf("volume %s is on its way out; unmount it to the end first: %w", old.GetSerial(), errdefs.ErrFailedPrecondition)
	}
	return v.mount.response, nil
}

// mount does all the work on a device that nobody else works on.
func (a *Agent) mount(ctx context.Context, req *guestv1.MountVolumeRequest, options filesystem.Options) (*mounted, error) {
	dev, size, err := a.findDevice(ctx, req)
	if err != nil {
		return nil, err
	}
	resp := &guestv1.MountVolumeResponse{DeviceBytes: size, Device: dev.Path}
	if err := prepare(ctx, dev, req, resp); err != nil {
		return nil, err
	}
	if err := a.config.Modules.LoadForFilesystem(req.GetFsType()); err != nil {
		return nil, err
	}
	path := req.GetMountPath()
	made, err := filesystem.MakeTarget(path, false)
	if err != nil {
		return nil, err
	}
	if there, err := filesystem.IsMountPoint(path); err != nil {
		return nil, err
	} else if there {
		return nil, fmt.Errorf("something else is mounted at %s: %w", path, errdefs.ErrFailedPrecondition)
	}
	if err := filesystem.Mount(ctx, dev.Path, req.GetFsType(), path, options); err != nil {
		if made {
			filesystem.RemoveTarget(path)
		}
		return nil, err
	}
	if err := settle(ctx, dev, req, options, resp); err != nil {
		undo := filesystem.Unmount(path)
		if made && undo == nil {
			filesystem.RemoveTarget(path)
		}
		return nil, errors.Join(err, undo)
	}
	return &mounted{request: req, response: resp, device: dev, writable: !options.ReadOnly(), made: made}, nil
}

// findDevice waits for the device and holds it against the request.
func (a *Agent) findDevice(ctx context.Context, req *guestv1.MountVolumeRequest) (device.Device, int64, error) {
	dev, err := a.devices.Find(ctx, req.GetSerial())
	if err != nil {
		return dev, 0, err
	}
	size, err := dev.WaitSize(ctx, req.GetMinDeviceBytes())
	if err != nil {
		return dev, 0, err
	}
	readOnly, err := dev.ReadOnly()
	switch {
	case err != nil:
		return dev, 0, err
	case readOnly && !req.GetReadOnly():
		return dev, 0, fmt.Errorf("device %s is read-only; attach it writable, or ask for a read-only mount: %w", dev.Name, errdefs.ErrFailedPrecondition)
	case !readOnly && req.GetReadOnly():
		// A filesystem that is mounted read-only still writes when it replays its log.
		return dev, 0, fmt.Errorf("device %s is writable; attach it read-only, so that nothing can change it: %w", dev.Name, errdefs.ErrFailedPrecondition)
	}
	inUse, err := dev.InUse()
	if err == nil && inUse {
		err = fmt.Errorf("device %s is in use by something else in the guest: %w", dev.Name, errdefs.ErrFailedPrecondition)
	}
	return dev, size, err
}

var grounds = map[guestv1.FormatPolicy]filesystem.Grounds{
	guestv1.FormatPolicy_FORMAT_POLICY_NEVER_WRITTEN:     filesystem.NeverWritten,
	guestv1.FormatPolicy_FORMAT_POLICY_UNFINISHED_FORMAT: filesystem.UnfinishedFormat,
}

// prepare makes or checks the filesystem, as was decided.
func prepare(ctx context.Context, dev device.Device, req *guestv1.MountVolumeRequest, resp *guestv1.MountVolumeResponse) error {
	found, err := filesystem.Read(ctx, dev.Path, resp.GetDeviceBytes())
	if err != nil {
		return err
	}
	wish := filesystem.Wish{Type: req.GetFsType(), ReadOnly: req.GetReadOnly(), Grounds: grounds[req.GetFormat()]}
	decision, err := filesystem.Decide(found, wish)
	if err != nil {
		return err
	}
	if decision.Make == filesystem.MakeUnlessSound {
		sound, err := filesystem.Sound(ctx, dev.Path, wish.Type)
		if err != nil {
			return err
		}
		if sound {
			resp.Checked = true
			return nil
		}
	}
	if decision.Make != filesystem.MakeNone {
		if err := filesystem.Make(ctx, dev.Path, wish.Type, decision.Make != filesystem.MakeFresh); err != nil {
			return err
		}
		resp.Formatted = true
	}
	if decision.Check {
		resp.Checked, resp.Repaired, err = filesystem.Check(ctx, dev.Path, wish.Type)
	}
	return err
}

// settle does what needs the filesystem to be mounted and writable.
func settle(ctx context.Context, dev device.Device, req *guestv1.MountVolumeRequest, options filesystem.Options, resp *guestv1.MountVolumeResponse) error {
	if options.ReadOnly() {
		return nil
	}
	var err error
	if resp.Grown, err = filesystem.Grow(req.GetMountPath(), dev.Path, req.GetFsType(), resp.GetDeviceBytes()); err != nil {
		return err
	}
	if req.SupplementalGroup == nil {
		return nil
	}
	if req.GetSupplementalGroupChangePolicy() == guestv1.GroupChangePolicy_GROUP_CHANGE_POLICY_ON_ROOT_MISMATCH {
		if fits, err := ownership.Fits(req.GetMountPath(), req.GetSupplementalGroup()); err != nil || fits {
			return err
		}
	}
	resp.GroupApplied = true
	return ownership.Apply(ctx, req.GetMountPath(), req.GetSupplementalGroup())
}
