package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Stop ends a sandbox in another process and waits until it has ended. After timeout it is killed, and ErrUnavailable
// says so. Of a dead one the directory is removed. ErrNotFound if there is none of that id.
func Stop(ctx context.Context, root, id string, timeout time.Duration) error {
	info, err := Read(root, id)
	if err != nil {
		return err
	}
	if !info.Alive {
		return sweepDead(root, id)
	}
	if info.PID == 0 {
		return fmt.Errorf("sandbox %s is only just starting; try again: %w", id, errdefs.ErrUnavailable)
	}
	// A pidfd is for this very process; once it is open, the lock says whether that is the one we read of.
	pidfd, err := unix.PidfdOpen(info.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return sweepDead(root, id)
	}
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	defer unix.Close(pidfd)
	again, err := Read(root, id)
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if !again.Alive || again.PID != info.PID || !again.Started.Equal(info.Started) {
		return fmt.Errorf("sandbox %s has ended and another one has its id; try again: %w", id, errdefs.ErrUnavailable)
	}
	if err := unix.PidfdSendSignal(pidfd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if waitForEnd(ctx, pidfd) {
		return nil
	}
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("sandbox %s: %w", id, err)
	}
	killCtx, cancelKill := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancelKill()
	ended := waitForEnd(killCtx, pidfd)
	err = fmt.Errorf("sandbox %s did not end by itself and was killed; its volumes are checked when they are mounted again: %w", id, errdefs.ErrUnavailable)
	if !ended {
		return err
	}
	return errors.Join(err, sweepDead(root, id))
}

// waitForEnd polls a pidfd, which becomes readable when its process ends (pidfd_open(2)).
func waitForEnd(ctx context.Context, pidfd int) bool {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 100)
		if n > 0 {
			return true
		}
		if ctx.Err() != nil || err != nil && !errors.Is(err, unix.EINTR) {
			return false
		}
	}
}

// sweepDead removes the directory of a sandbox that has ended without doing so.
func sweepDead(root, id string) error {
	d, err := claimDirectory(root, id)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return d.remove()
}
