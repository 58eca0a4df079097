package guest

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
)

// unmountRetries is how often a volume is unmounted again after its users were killed: they may have had children.
const unmountRetries = 3

// Shutdown is that of the API. When it fails, everything that can be written is on the devices, what is named in the error
// is still mounted, and the agent goes on, so that it can be called again.
func (a *Agent) Shutdown(ctx context.Context, _ *guestv1.ShutdownRequest) (*guestv1.ShutdownResponse, error) {
	if err := a.beginStop(); err != nil {
		return nil, err
	}
	if err := a.takeDown(ctx); err != nil {
		unix.Sync()
		a.endStop()
		return nil, fmt.Errorf("shut down: %w", err)
	}
	close(a.shutdown)
	return &guestv1.ShutdownResponse{}, nil
}

// beginStop refuses new mounts from here on.
func (a *Agent) beginStop() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stopping {
		return fmt.Errorf("the guest is shutting down already: %w", errdefs.ErrUnavailable)
	}
	a.stopping = true
	return nil
}

func (a *Agent) endStop() {
	a.commands.Reopen()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stopping = false
}

func (a *Agent) takeDown(ctx context.Context) error {
	volumes := a.newestFirst()
	for _, v := range volumes {
		// A command that waits for a thaw could not be killed.
		if err := v.thaw(); err != nil && !errors.Is(err, errdefs.ErrFailedPrecondition) {
			a.config.Log.WarnContext(ctx, "thaw", rpc.LogPath, v.path, rpc.LogError, err)
		}
	}
	killCtx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := a.commands.Close(killCtx); err != nil {
		a.config.Log.WarnContext(ctx, "end commands", rpc.LogError, err)
	}
	// A volume may show a part of another one, which then has to go first, whatever the order of the mounts.
	err := a.takeDownOnce(ctx, volumes)
	for range len(volumes) - 1 {
		if err == nil || ctx.Err() != nil {
			break
		}
		err = a.takeDownOnce(ctx, volumes)
	}
	return err
}

// takeDownOnce unmounts all volumes, and goes on after an error.
func (a *Agent) takeDownOnce(ctx context.Context, volumes []*volume) error {
	var errs []error
	for _, v := range volumes {
		select {
		case v.lock <- struct{}{}:
			if v.mount != nil {
				errs = append(errs, a.unmountForGood(ctx, v))
			}
			<-v.lock
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("another call works on %s: %w", v.path, context.Cause(ctx)))
		}
	}
	return errors.Join(errs...)
}

// unmountForGood unmounts a volume; in a guest that exists for the agent only, it ends the processes that are in the way.
func (a *Agent) unmountForGood(ctx context.Context, v *volume) error {
	var err error
	for range unmountRetries {
		err = a.unmount(ctx, v)
		if !a.config.Dedicated || !errors.Is(err, errdefs.ErrFailedPrecondition) {
			return err
		}
		users, usersErr := usersOf(v.mount.device)
		if usersErr != nil {
			return errors.Join(err, usersErr)
		}
		for _, u := range users {
			_ = unix.Kill(u.pid, unix.SIGKILL)
		}
		if ctx.Err() != nil {
			return err
		}
	}
	return err
}
