package guest

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// GetVolumeStats is that of the API. It waits for no other call.
func (a *Agent) GetVolumeStats(_ context.Context, req *guestv1.GetVolumeStatsRequest) (*guestv1.GetVolumeStatsResponse, error) {
	m, err := a.mountOf(req.GetMountPath())
	if err != nil {
		return nil, err
	}
	path := req.GetMountPath()
	bytes, inodes, err := filesystem.Stats(path)
	if err != nil {
		return nil, err
	}
	wrong, err := filesystem.Health(path, m.device.Path, m.request.GetFsType(), m.writable)
	if err != nil {
		return nil, err
	}
	size, err := m.device.Size()
	if err != nil {
		return nil, err
	}
	return &guestv1.GetVolumeStatsResponse{
		TotalBytes: bytes.Total, AvailableBytes: bytes.Available, UsedBytes: bytes.Used,
		TotalInodes: inodes.Total, AvailableInodes: inodes.Available, UsedInodes: inodes.Used,
		Abnormal: wrong != "", Message: wrong, DeviceBytes: size,
	}, nil
}

// GrowVolume is that of the API.
func (a *Agent) GrowVolume(ctx context.Context, req *guestv1.GrowVolumeRequest) (*guestv1.GrowVolumeResponse, error) {
	if req.GetMinDeviceBytes() < 0 {
		return nil, invalid("min_device_bytes %d is negative", req.GetMinDeviceBytes())
	}
	v, release, err := a.acquireMounted(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	if !v.mount.writable {
		return nil, fmt.Errorf("%s is mounted read-only and cannot grow: %w", v.path, errdefs.ErrFailedPrecondition)
	}
	if err := v.checkNotFrozen(); err != nil {
		return nil, err
	}
	size, err := v.mount.device.WaitSize(ctx, req.GetMinDeviceBytes())
	if err != nil {
		return nil, err
	}
	grown, err := filesystem.Grow(v.path, v.mount.device.Path, v.mount.request.GetFsType(), size)
	if err != nil {
		return nil, err
	}
	return &guestv1.GrowVolumeResponse{DeviceBytes: size, Grown: grown}, nil
}

// TrimVolume is that of the API.
func (a *Agent) TrimVolume(ctx context.Context, req *guestv1.TrimVolumeRequest) (*guestv1.TrimVolumeResponse, error) {
	v, release, err := a.acquireMounted(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	if err := v.checkNotFrozen(); err != nil {
		return nil, err
	}
	n, err := filesystem.Trim(v.path)
	if err != nil {
		return nil, err
	}
	return &guestv1.TrimVolumeResponse{TrimmedBytes: n}, nil
}
