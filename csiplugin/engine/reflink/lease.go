package reflink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
)

// Idle asks for a write lease and gives it back.
func (e *Engine) Idle(ctx context.Context, name engine.Name) error {
	return e.exclusively(ctx, name, os.O_RDONLY, func(*os.File) error { return nil })
}

// exclusively calls f while nobody but this call has the object open, or can open it. ErrFailedPrecondition if somebody
// has. The mode is what f needs; a sealed object can only be opened for reading.
func (e *Engine) exclusively(ctx context.Context, name engine.Name, mode int, f func(*os.File) error) error {
	file, err := e.open(name, mode)
	if err != nil {
		return err
	}
	defer file.Close() // it gives the lease back, too
	err = lease(ctx, file)
	if errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("object %s is in use%s; end that use and try again: %w", name, users(ctx, e.Path(name)), errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("lease on object %s: %w", name, err)
	}
	return f(file)
}

const (
	leaseTimeout = 250 * time.Millisecond
	leasePoll    = 5 * time.Millisecond
)

// lease takes a write lease, or fails with EAGAIN. It tries for a moment: whatever runs on a device event opens a device
// for an instant, and so does a child of this process between its fork and its exec.
func lease(ctx context.Context, file *os.File) error {
	deadline := time.Now().Add(leaseTimeout)
	for {
		_, err := unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
		if !errors.Is(err, unix.EAGAIN) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(leasePoll):
		}
	}
}
