package loopdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	detachTimeout = 5 * time.Second
	detachPoll    = 5 * time.Millisecond
)

// Detach detaches every device of a file and waits a few seconds until they have gone. ErrFailedPrecondition, naming a
// device, if one is still in use by then; the kernel detaches it when that use ends. A file without devices is success.
func Detach(ctx context.Context, path string) error {
	deadline := time.NewTimer(detachTimeout)
	defer deadline.Stop()
	for {
		found, err := Find(path)
		if err != nil || len(found) == 0 {
			return err
		}
		if err := clearAll(path, found); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("detach %s: %w", path, ctx.Err())
		case <-deadline.C:
			return fmt.Errorf("loop device %s of %s is still in use, perhaps by a mount in another mount namespace; end that use: %w",
				found[0].Path, path, errdefs.ErrFailedPrecondition)
		case <-time.After(detachPoll):
		}
	}
}

func clearAll(path string, devices []Attached) error {
	for _, a := range devices {
		if a.Passing {
			continue // the kernel waits for the last user already
		}
		err := control(path, a, func(dev *os.File) error {
			// With other users the kernel makes the device a passing one instead.
			err := unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("detach %s: %w", a.Path, err)
		}
	}
	return nil
}

// Grow makes the devices of a file as large as the file is now.
func Grow(path string) error {
	found, err := Find(path)
	if err != nil {
		return err
	}
	for _, a := range found {
		err := control(path, a, func(dev *os.File) error {
			return unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_CAPACITY, 0)
		})
		if err != nil {
			return fmt.Errorf("grow %s: %w", a.Path, err)
		}
	}
	return nil
}

// control calls f if the device is still the file's.
func control(path string, a Attached, f func(dev *os.File) error) error {
	var file unix.Stat_t
	if err := unix.Lstat(path, &file); err != nil {
		return err
	}
	return withDevice(a.Path, &file, func(dev *os.File, _ *unix.LoopInfo64) error { return f(dev) })
}
