package guest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// BindPath is that of the API. The same request twice succeeds; another one for the same destination is ErrAlreadyExists.
func (a *Agent) BindPath(ctx context.Context, req *guestv1.BindPathRequest) (*guestv1.BindPathResponse, error) {
	if err := checkBind(req); err != nil {
		return nil, err
	}
	v, release, err := a.acquireMounted(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	b := bind{subPath: req.GetSubPath(), destination: req.GetDestination(), readOnly: req.GetReadOnly()}
	for _, old := range v.binds {
		if old.destination != b.destination {
			continue
		}
		if old.subPath != b.subPath || old.readOnly != b.readOnly {
			return nil, fmt.Errorf("%s shows another part of %s: %w", b.destination, v.path, errdefs.ErrAlreadyExists)
		}
		return &guestv1.BindPathResponse{}, nil
	}
	if err := v.checkNotFrozen(); err != nil {
		return nil, err // a missing directory could not be made
	}
	if err := a.reserveDestination(b.destination, v.path); err != nil {
		return nil, err
	}
	if err := v.bind(&b); err != nil {
		a.releaseDestination(b.destination)
		return nil, fmt.Errorf("show %s at %s: %w", v.path, b.destination, err)
	}
	v.binds = append(v.binds, b)
	return &guestv1.BindPathResponse{}, nil
}

// UnbindPath is that of the API.
func (a *Agent) UnbindPath(ctx context.Context, req *guestv1.UnbindPathRequest) (*guestv1.UnbindPathResponse, error) {
	if err := checkPath("destination", req.GetDestination()); err != nil {
		return nil, err
	}
	v, release, err := a.acquireMounted(ctx, req.GetMountPath())
	if errors.Is(err, errdefs.ErrNotFound) {
		return &guestv1.UnbindPathResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	defer release()
	i := slices.IndexFunc(v.binds, func(b bind) bool { return b.destination == req.GetDestination() })
	if i < 0 {
		return &guestv1.UnbindPathResponse{}, nil
	}
	b := v.binds[i]
	if err := patiently(ctx, func() error { return filesystem.Unmount(b.destination) }); err != nil {
		return nil, v.busy(err)
	}
	if b.made {
		v.made = append(v.made, b.destination)
	}
	v.binds = slices.Delete(v.binds, i, i+1)
	a.releaseDestination(b.destination)
	return &guestv1.UnbindPathResponse{}, nil
}

func (v *volume) bind(b *bind) error {
	source, err := filesystem.OpenSource(v.path, b.subPath)
	if err != nil {
		return err
	}
	defer source.Close()
	if b.made, err = filesystem.MakeTarget(b.destination, source.File); err != nil {
		return err
	}
	there, err := filesystem.IsMountPoint(b.destination)
	if err == nil && there {
		err = fmt.Errorf("something else is mounted there: %w", errdefs.ErrAlreadyExists)
	}
	if err == nil {
		err = filesystem.Bind(source, b.destination, b.readOnly)
	}
	if err != nil && b.made {
		filesystem.RemoveTarget(b.destination)
	}
	return err
}

func (a *Agent) reserveDestination(destination, path string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if other, ok := a.destinations[destination]; ok {
		return fmt.Errorf("%s shows the volume mounted at %s: %w", destination, other, errdefs.ErrAlreadyExists)
	}
	a.destinations[destination] = path
	return nil
}

func (a *Agent) releaseDestination(destination string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.destinations, destination)
}
