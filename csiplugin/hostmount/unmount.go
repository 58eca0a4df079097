package hostmount

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Clear unmounts what is mounted at a path, from the top, as long as ours reports it as such. A mount of somebody else
// stays, with what is beneath it. A mount in use is ErrFailedPrecondition. A path without mounts is success.
func Clear(ctx context.Context, path string, ours func(*Mount) bool) error {
	for {
		m, err := At(path)
		if err != nil || m == nil || !ours(m) {
			return err
		}
		err = Unmount(ctx, path)
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("%w; somebody still has files open there: %w", err, errdefs.ErrFailedPrecondition)
		}
		if err != nil {
			return err
		}
	}
}

const (
	busyTimeout = 500 * time.Millisecond
	busyPoll    = 5 * time.Millisecond
)

// Unmount unmounts the topmost mount at a path. EBUSY if it is in use, and that for more than a moment: a child of this
// process has its descriptors between fork and exec, and others look into a mount in passing.
func Unmount(ctx context.Context, path string) error {
	deadline := time.NewTimer(busyTimeout)
	defer deadline.Stop()
	for {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		if err == nil {
			return nil
		}
		err = fmt.Errorf("unmount %s: %w", path, err)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-deadline.C:
			return err
		case <-time.After(busyPoll):
		}
	}
}
