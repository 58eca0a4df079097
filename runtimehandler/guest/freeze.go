package guest

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// FreezeVolume is that of the API.
func (a *Agent) FreezeVolume(ctx context.Context, req *guestv1.FreezeVolumeRequest) (*guestv1.FreezeVolumeResponse, error) {
	limit, err := checkFreeze(req)
	if err != nil {
		return nil, err
	}
	v, release, err := a.acquireMounted(ctx, req.GetMountPath())
	if err != nil {
		return nil, err
	}
	defer release()
	if err := v.freeze(limit, func(err error) {
		a.config.Log.Warn("a volume was thawed because its time was up", rpc.LogPath, v.path, rpc.LogError, err)
	}); err != nil {
		return nil, err
	}
	return &guestv1.FreezeVolumeResponse{}, nil
}

// ThawVolume is that of the API. It waits for no other call.
func (a *Agent) ThawVolume(_ context.Context, req *guestv1.ThawVolumeRequest) (*guestv1.ThawVolumeResponse, error) {
	v, err := a.mountedVolume(req.GetMountPath())
	if err != nil {
		return nil, err
	}
	if err := v.thaw(); err != nil {
		return nil, err
	}
	return &guestv1.ThawVolumeResponse{}, nil
}

// freeze freezes the volume until thaw, or until limit has passed, when thawed is told.
func (v *volume) freeze(limit time.Duration, thawed func(error)) error {
	v.freezeMu.Lock()
	defer v.freezeMu.Unlock()
	if v.frozen != nil {
		return fmt.Errorf("%s is frozen already: %w", v.path, errdefs.ErrFailedPrecondition)
	}
	fs, err := filesystem.Freeze(v.path)
	if err != nil {
		return err
	}
	f := &frozen{fs: fs}
	f.limit = time.AfterFunc(limit, func() {
		v.freezeMu.Lock()
		defer v.freezeMu.Unlock()
		if v.frozen == f {
			v.frozen = nil
			thawed(f.fs.Thaw())
		}
	})
	v.frozen = f
	return nil
}

// thaw ends a freeze. ErrFailedPrecondition if there is none any more.
func (v *volume) thaw() error {
	v.freezeMu.Lock()
	defer v.freezeMu.Unlock()
	if v.frozen == nil {
		return fmt.Errorf("%s is not frozen, or no longer: %w", v.path, errdefs.ErrFailedPrecondition)
	}
	f := v.frozen
	v.frozen = nil
	f.limit.Stop()
	return f.fs.Thaw()
}

// checkNotFrozen refuses what would wait for the thaw.
func (v *volume) checkNotFrozen() error {
	v.freezeMu.Lock()
	defer v.freezeMu.Unlock()
	if v.frozen != nil {
		return fmt.Errorf("%s is frozen; thaw it first: %w", v.path, errdefs.ErrFailedPrecondition)
	}
	return nil
}
