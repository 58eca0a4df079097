package guest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// UnmountVolume is that of the API. Success means that nothing in the guest holds the device any more.
func (a *Agent) UnmountVolume(ctx context.Context, req *guestv1.UnmountVolumeRequest) (*guestv1.UnmountVolumeResponse, error) {
	if err := checkPath("mount_path", req.GetMountPath()); err != nil {
		return nil, err
	}
	v, release, err := a.acquire(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	if err := a.unmount(ctx, v); err != nil {
		return nil, err
	}
	return &guestv1.UnmountVolumeResponse{}, nil
}

// unmount takes a volume down; its lock is held. When it fails it can be called again and goes on from there.
func (a *Agent) unmount(ctx context.Context, v *volume) error {
	if v.mount == nil {
		there, err := filesystem.IsMountPoint(v.path)
		if err == nil && there {
			err = fmt.Errorf("what is mounted at %s is not a volume: %w", v.path, errdefs.ErrFailedPrecondition)
		}
		return err
	}
	if err := v.thaw(); err != nil && !errors.Is(err, errdefs.ErrFailedPrecondition) {
		return err
	}
	for _, b := range slices.Backward(v.binds) {
		if err := patiently(ctx, func() error { return filesystem.Unmount(b.destination) }); err != nil {
			return v.busy(err)
		}
		if b.made {
			v.made = append(v.made, b.destination)
		}
		v.binds = v.binds[:len(v.binds)-1]
		a.releaseDestination(b.destination)
	}
	if v.root != nil {
		if err := v.root.takeDown(ctx); err != nil {
			return v.busy(err)
		}
		v.root = nil
	}
	if !v.leaving {
		if err := patiently(ctx, func() error { return filesystem.Unmount(v.path) }); err != nil {
			return v.busy(err)
		}
		if v.mount.made {
			v.made = append(v.made, v.path)
		}
		v.leaving = true
	}
	if err := patiently(ctx, v.checkFree); err != nil {
		return v.busy(err)
	}
	// Not before: to remove a directory is to detach what is mounted on it in other namespaces, in use or not.
	for _, target := range v.made {
		filesystem.RemoveTarget(target)
	}
	v.made = nil
	a.clearMount(v)
	return nil
}

// checkFree says whether the device of an unmounted volume is free: another mount namespace may still have a mount of it.
func (v *volume) checkFree() error {
	inUse, err := v.mount.device.InUse()
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil // it was unplugged
	}
	if err == nil && inUse {
		err = fmt.Errorf("unmounted %s, but device %s is still in use: %w", v.path, v.mount.device.Name, errdefs.ErrFailedPrecondition)
	}
	return err
}

// A process that was killed a moment ago may still have files open, and a mount namespace outlives its last process by
// some milliseconds.
const (
	patience     = time.Second
	patienceStep = 20 * time.Millisecond
)

// patiently tries again for a moment what fails because something is in use.
func patiently(ctx context.Context, try func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if !errors.Is(err, errdefs.ErrFailedPrecondition) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(patienceStep):
		}
	}
}

// maxNamed is how many processes an error names.
const maxNamed = 10

// busy adds to an error who uses the volume.
func (v *volume) busy(err error) error {
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		return err
	}
	users, usersErr := usersOf(v.mount.device)
	if usersErr != nil || len(users) == 0 {
		return fmt.Errorf("volume %s: %w; no process was found that uses it: another mount beneath it may", v.mount.request.GetSerial(), err)
	}
	var names []string
	for _, u := range users[:min(len(users), maxNamed)] {
		names = append(names, u.String())
	}
	if len(users) > maxNamed {
		names = append(names, fmt.Sprintf("and %d more", len(users)-maxNamed))
	}
	return fmt.Errorf("volume %s: %w; it is used by %s; end that first", v.mount.request.GetSerial(), err, strings.Join(names, ", "))
}
