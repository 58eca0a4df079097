// Package device finds block devices by their virtio serial, never by their order, and asks the kernel about them.
package device

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// MaxSerial is the size of a virtio-blk serial in bytes (VIRTIO_BLK_ID_BYTES; virtio 1.2, section 5.2.6).
const MaxSerial = 20

const (
	sectorBytes = 512 // the unit of /sys/block/*/size, whatever the device's block size
	// pollInterval is how often the kernel is asked for something that has not happened yet. A look takes microseconds.
	pollInterval = 10 * time.Millisecond
	// answerReserve is what is left of the caller's time when the waiting ends, so that the answer still arrives.
	answerReserve = 500 * time.Millisecond
)

// maxWait bounds how long a device, or a new size, is waited for. The host asks for a volume after it was attached, so
// that what has not appeared by then never will.
const maxWait = time.Minute

// Finder looks for devices.
type Finder struct {
	Sys string // where sysfs is; empty is /sys
	Dev string // where devtmpfs is; empty is /dev
}

// Device is a block device.
type Device struct {
	Name string // vda
	Path string // /dev/vda
	sys  string // /sys/block/vda
}

// Find waits until the device with a serial is there. ErrNotFound if it does not appear in a minute, or before ctx is
// about to end; ErrFailedPrecondition if two devices have the serial.
func (f Finder) Find(ctx context.Context, serial string) (Device, error) {
	var d Device
	err := wait(ctx, func() (done bool, err error) {
		d, err = f.look(serial)
		if errors.Is(err, errdefs.ErrNotFound) {
			return false, nil
		}
		return err == nil, err
	})
	if errors.Is(err, errdefs.ErrUnavailable) {
		return Device{}, fmt.Errorf("no device with serial %q has appeared; is it attached?: %w", serial, errdefs.ErrNotFound)
	}
	return d, err
}

// look returns the device with a serial. ErrNotFound if it is not there, or cannot be opened yet.
func (f Finder) look(serial string) (Device, error) {
	sys, dev := orDefault(f.Sys, "/sys"), orDefault(f.Dev, "/dev")
	files, err := filepath.Glob(filepath.Join(sys, "block", "*", "serial"))
	if err != nil {
		return Device{}, fmt.Errorf("find a device: %w", err)
	}
	var found []Device
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			continue // unplugged meanwhile, or on its way
		}
		if strings.TrimRight(string(content), "\x00\n") == serial {
			name := filepath.Base(filepath.Dir(file))
			found = append(found, Device{Name: name, Path: filepath.Join(dev, name), sys: filepath.Dir(file)})
		}
	}
	switch {
	case len(found) > 1:
		return Device{}, fmt.Errorf("devices %s and %s have the same serial %q; it must be unique in a sandbox: %w",
			found[0].Name, found[1].Name, serial, errdefs.ErrFailedPrecondition)
	case len(found) == 0:
		return Device{}, errdefs.ErrNotFound
	}
	// A device shows up in sysfs, and even as a node, a moment before it can be opened.
	node, err := os.Open(found[0].Path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) {
		return Device{}, errdefs.ErrNotFound
	}
	if err != nil {
		return Device{}, fmt.Errorf("device %s: %w", found[0].Name, err)
	}
	return found[0], node.Close()
}

// Size returns the device's size in bytes. ErrNotFound if it was unplugged.
func (d Device) Size() (int64, error) {
	sectors, err := d.number("size")
	return sectors * sectorBytes, err
}

// WaitSize waits until the device has at least so many bytes, and returns how many it has. ErrFailedPrecondition, with
// its present size, if that does not happen.
func (d Device) WaitSize(ctx context.Context, atLeast int64) (int64, error) {
	var size int64
	err := wait(ctx, func() (bool, error) {
		var err error
		size, err = d.Size()
		return size >= atLeast, err
	})
	if errors.Is(err, errdefs.ErrUnavailable) {
		return size, fmt.Errorf("device %s has %d bytes, and was to have %d; grow the device first: %w", d.Name, size, atLeast, errdefs.ErrFailedPrecondition)
	}
	return size, err
}

// ReadOnly says whether the device takes no writes.
func (d Device) ReadOnly() (bool, error) {
	ro, err := d.number("ro")
	return ro != 0, err
}

// InUse says whether something in the kernel, such as a filesystem mounted in whatever namespace, has claimed the device
// for itself (open(2), O_EXCL). ErrNotFound if it was unplugged.
func (d Device) InUse() (bool, error) {
	f, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	if errors.Is(err, unix.EBUSY) {
		return true, nil
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) {
		return false, fmt.Errorf("device %s is gone: %w", d.Name, errdefs.ErrNotFound)
	}
	if err != nil {
		return false, fmt.Errorf("device %s: %w", d.Name, err)
	}
	return false, f.Close()
}

func (d Device) number(attribute string) (int64, error) {
	content, err := os.ReadFile(filepath.Join(d.sys, attribute))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("device %s is gone: %w", d.Name, errdefs.ErrNotFound)
	}
	if err != nil {
		return 0, fmt.Errorf("device %s: %w", d.Name, err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("device %s: %s: %w", d.Name, attribute, err)
	}
	return n, nil
}

// wait asks until the answer is yes. ErrUnavailable if it never is in the time that there is.
func wait(ctx context.Context, ask func() (bool, error)) error {
	limit := time.Now().Add(maxWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerReserve).Before(limit) {
		limit = deadline.Add(-answerReserve)
	}
	timeout := time.NewTimer(time.Until(limit))
	defer timeout.Stop()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		done, err := ask()
		if done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timeout.C:
			return errdefs.ErrUnavailable
		case <-tick.C:
		}
	}
}

func orDefault(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
