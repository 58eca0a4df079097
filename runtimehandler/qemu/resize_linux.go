package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// lockPoll is how often a lock is tried that somebody else has.
const lockPoll = 10 * time.Millisecond

// ResizeDisk makes the guest see the present size of a disk's file or device, and returns that size in bytes (of a file, in
// whole blocks of 4 KiB). A file that
// has become smaller is ErrFailedPrecondition and nothing is changed. ErrNotFound if the disk is not attached.
//
// QEMU's block_resize sets the size of an image file instead of reading it. So that a file that somebody grows further at
// this moment is not cut back, the file is locked (flock(2)) from the look at its size to the end of the command; whoever
// changes its size has to do the same.
func (vm *VM) ResizeDisk(ctx context.Context, serial string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	d := vm.find(serial)
	if d == nil {
		return 0, fmt.Errorf("resize disk %s: it is not attached: %w", serial, errdefs.ErrNotFound)
	}
	defer d.mu.Unlock()
	if !d.ready {
		return 0, fmt.Errorf("resize disk %s: it was attached in part; detach it first: %w", serial, errdefs.ErrFailedPrecondition)
	}
	size, err := vm.resize(ctx, d)
	if err != nil {
		return 0, fmt.Errorf("resize disk %s: %w", serial, err)
	}
	return size, nil
}

func (vm *VM) resize(ctx context.Context, d *disk) (int64, error) {
	if !d.source.block {
		lock, err := lockFile(ctx, d.source)
		if err != nil {
			return 0, err
		}
		defer lock.Close()
	}
	size, err := d.source.present()
	if err != nil {
		return 0, err
	}
	known, err := vm.knownSize(ctx, d)
	if err != nil {
		return 0, err
	}
	size -= size % d.source.unit()
	switch {
	case size < known:
		return 0, fmt.Errorf("%s has %d bytes, and had %d when the guest last saw it; a disk cannot be made smaller: %w",
			d.Path, size, known, errdefs.ErrFailedPrecondition)
	case size == known && !d.source.block:
		return size, nil
	}
	// On a block device the command changes nothing; it makes QEMU tell the guest.
	return size, vm.monitor.Execute(ctx, "block_resize", map[string]any{"node-name": d.name(), "size": size}, nil)
}

// knownSize is the size that QEMU knows: that of a file when it last opened or resized it, that of a block device now.
func (vm *VM) knownSize(ctx context.Context, d *disk) (int64, error) {
	nodes, err := vm.nodes(ctx)
	if err != nil {
		return 0, err
	}
	for _, n := range nodes {
		if n.Name == d.name() {
			return n.Image.Bytes, nil
		}
	}
	return 0, fmt.Errorf("QEMU has no node %s: %w", d.name(), errdefs.ErrInternal)
}

// lockFile takes the lock of an image file's size; it is given back when the file is closed.
func lockFile(ctx context.Context, s *source) (*os.File, error) {
	f, err := s.reopen(os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock: %w", err), f.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("somebody else has locked the file: %w: %w", context.Cause(ctx), errdefs.ErrUnavailable), f.Close())
		case <-time.After(lockPoll):
		}
	}
}
