package guest

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// PrepareRoot is that of the API. What it has mounted when it fails is unmounted again.
func (a *Agent) PrepareRoot(ctx context.Context, req *guestv1.PrepareRootRequest) (*guestv1.PrepareRootResponse, error) {
	mounts, err := checkRoot(req)
	if err != nil {
		return nil, err
	}
	v, release, err := a.acquireMounted(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	if v.root != nil {
		if !proto.Equal(v.root.request, req) {
			return nil, fmt.Errorf("%s is a root filesystem with other mounts: %w", v.path, errdefs.ErrAlreadyExists)
		}
		return &guestv1.PrepareRootResponse{}, nil
	}
	if !v.mount.writable {
		return nil, fmt.Errorf("%s is mounted read-only; a root filesystem has to be writable: %w", v.path, errdefs.ErrFailedPrecondition)
	}
	made, err := filesystem.PrepareRoot(v.path, mounts)
	if err != nil {
		return nil, fmt.Errorf("root filesystem at %s: %w", v.path, err)
	}
	v.root = &root{request: req, mounts: made}
	return &guestv1.PrepareRootResponse{}, nil
}

// takeDown unmounts what was mounted, the last first. When it fails it goes on from there when it is called again.
func (r *root) takeDown(ctx context.Context) error {
	for _, target := range slices.Backward(r.mounts) {
		if err := patiently(ctx, func() error { return filesystem.Unmount(target) }); err != nil {
			return err
		}
		r.mounts = r.mounts[:len(r.mounts)-1]
	}
	return nil
}
