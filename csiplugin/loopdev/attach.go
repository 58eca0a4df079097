package loopdev

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// attachTries is how often a free device is asked for before somebody else, who gets all of them first, is blamed.
const attachTries = 64

// Options says how a file is attached.
type Options struct {
	// ReadOnly makes the kernel refuse every write, also those of root.
	ReadOnly bool
	// Lasting keeps the device until Detach, even if nobody uses it.
	Lasting bool
}

// Device is a loop device that this process keeps open.
type Device struct {
	// Path of the device node.
	Path string
	// Direct says that the device bypasses the page cache of the file's filesystem.
	Direct bool
	node   *os.File
}

// Attach attaches a regular file to a free loop device. The caller must Close the device, after which a passing one
// lives as long as it is mounted or otherwise open. It does not look whether the file is attached already: see [Find].
// ErrResourceExhausted if no device can be had.
func Attach(ctx context.Context, path string, o Options) (*Device, error) {
	mode := os.O_RDWR
	if o.ReadOnly {
		mode = os.O_RDONLY
	}
	file, err := os.OpenFile(path, mode|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	defer file.Close()
	config := unix.LoopConfig{Fd: uint32(file.Fd())}
	config.Info.Flags = flags(o)
	copy(config.Info.File_name[:len(config.Info.File_name)-1], path)
	for range attachTries {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("attach %s: %w", path, err)
		}
		dev, err := attachFree(&config)
		if errors.Is(err, unix.EBUSY) {
			continue // another process was faster
		}
		if err != nil {
			return nil, fmt.Errorf("attach %s: %w", path, err)
		}
		return dev, nil
	}
	return nil, fmt.Errorf("attach %s: other processes took %d free loop devices before it: %w", path, attachTries, errdefs.ErrResourceExhausted)
}

func flags(o Options) uint32 {
	f := uint32(unix.LO_FLAGS_DIRECT_IO)
	if o.ReadOnly {
		f |= unix.LO_FLAGS_READ_ONLY
	}
	if !o.Lasting {
		f |= unix.LO_FLAGS_AUTOCLEAR
	}
	return f
}

func attachFree(config *unix.LoopConfig) (*Device, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	index, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return nil, fmt.Errorf("free loop device: %w: %w", err, errdefs.ErrResourceExhausted)
	}
	path := fmt.Sprintf("/dev/loop%d", index)
	node, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlLoopConfigure(int(node.Fd()), config); err != nil {
		return nil, errors.Join(fmt.Errorf("configure %s: %w", path, err), node.Close())
	}
	status, err := unix.IoctlLoopGetStatus64(int(node.Fd()))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("status of %s: %w", path, err), node.Close())
	}
	return &Device{Path: path, Direct: status.Flags&unix.LO_FLAGS_DIRECT_IO != 0, node: node}, nil
}

// Close lets go of the device. A passing one that nobody else uses is thereby detached.
func (d *Device) Close() error { return d.node.Close() }
