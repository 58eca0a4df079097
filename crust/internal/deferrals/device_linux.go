package deferrals

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/crust/internal/process"
	"crust.dev/crust/runtimehandler"
)

// sectorBytes is the unit in which block devices have their size.
const sectorBytes = 512

// resolveDevice checks what a storage names as device and returns its path without symbolic links, and its size in
// bytes. It must be a block device or a regular file of at least the announced size, in whole sectors, and lie in one of
// the roots if there are any.
func resolveDevice(path string, announced int64, roots []string) (resolved string, size int64, err error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return "", 0, fmt.Errorf("device %q is not a clean absolute path: %w", path, errdefs.ErrInvalidArgument)
	}
	resolved, err = filepath.EvalSymlinks(path)
	if err != nil {
		return "", 0, fmt.Errorf("device: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err := allowed(resolved, roots); err != nil {
		return "", 0, err
	}
	if size, err = DeviceSize(resolved); err != nil {
		return "", 0, err
	}
	switch {
	case size == 0 || size%sectorBytes != 0:
		return "", 0, fmt.Errorf("device %s has %d bytes, want a multiple of %d: %w", resolved, size, sectorBytes, errdefs.ErrFailedPrecondition)
	case size < announced:
		return "", 0, fmt.Errorf("device %s has %d bytes, %d were announced: %w", resolved, size, announced, errdefs.ErrFailedPrecondition)
	}
	return resolved, size, nil
}

// allowed is ErrPermissionDenied for a device, without symbolic links, that lies in none of the roots.
func allowed(device string, roots []string) error {
	within := func(root string) bool {
		real, err := filepath.EvalSymlinks(root)
		if err != nil {
			return false // a root that is not there has nothing in it
		}
		rel, err := filepath.Rel(real, device)
		return err == nil && filepath.IsLocal(rel)
	}
	if len(roots) == 0 || slices.ContainsFunc(roots, within) {
		return nil
	}
	return fmt.Errorf("device %s is outside of the directories from which devices are handed to sandboxes (%s); if the driver is right, "+
		"add its directory to deviceRoots in crustd's configuration: %w", device, strings.Join(roots, ", "), errdefs.ErrPermissionDenied)
}

// DeviceSize returns the size in bytes of a block device or regular file; anything else is ErrFailedPrecondition.
func DeviceSize(path string) (int64, error) {
	// O_NONBLOCK: opening a FIFO must not wait for its other end.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, fmt.Errorf("device: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("device: %w", err)
	}
	switch {
	case info.Mode().IsRegular():
		return info.Size(), nil
	case isBlock(info.Mode()):
		size, err := f.Seek(0, 2)
		if err != nil {
			return 0, fmt.Errorf("size of device %s: %w", path, err)
		}
		return size, nil
	default:
		return 0, fmt.Errorf("device %s is neither a block device nor a regular file (%s): %w", path, info.Mode().Type(), errdefs.ErrFailedPrecondition)
	}
}

func isBlock(mode os.FileMode) bool {
	return mode&os.ModeDevice != 0 && mode&os.ModeCharDevice == 0
}

// unusedByHost is ErrFailedPrecondition if the host itself uses a device that a sandbox is to write to: a block device
// that is mounted or part of another, an image file behind a loop device. Read-only deferrals are not kept from
// read-only mounts by this, as both are open for reading only.
func unusedByHost(d runtimehandler.Deferral) error {
	if d.ReadOnly {
		return nil
	}
	info, err := os.Stat(d.Device)
	if err != nil {
		return fmt.Errorf("device: %w", err)
	}
	if !isBlock(info.Mode()) {
		loops, err := process.LoopHolders(d.Device)
		if err != nil {
			return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
		}
		if len(loops) > 0 {
			return fmt.Errorf("device %s of volume %s is in use on the host, by %s; delete the pod that uses it there first: %w",
				d.Device, d.VolumeID, loops[0], errdefs.ErrFailedPrecondition)
		}
		return nil
	}
	// A mount, a device mapper table or a swap area holds its block device exclusively (open(2), O_EXCL).
	fd, err := unix.Open(d.Device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("device %s of volume %s is in use on the host; delete the pod that uses it there first: %w", d.Device, d.VolumeID, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("device %s: %w", d.Device, err)
	}
	return unix.Close(fd)
}

// sameDevice says whether two paths lead to one device. A path that leads nowhere is no device.
func sameDevice(a, b string) bool {
	if a == "" || b == "" {
		return false
	}
	if a == b {
		return true
	}
	var sa, sb unix.Stat_t
	if unix.Stat(a, &sa) != nil || unix.Stat(b, &sb) != nil {
		return false
	}
	if sa.Mode&unix.S_IFMT == unix.S_IFBLK && sb.Mode&unix.S_IFMT == unix.S_IFBLK {
		return sa.Rdev == sb.Rdev
	}
	return sa.Dev == sb.Dev && sa.Ino == sb.Ino
}

// publishedFrom says whether what a driver has put at a target path, a mounted filesystem or a block device, is on a
// device.
func publishedFrom(target, device string) (bool, error) {
	var at, dev unix.Stat_t
	if err := unix.Stat(target, &at); err != nil {
		return false, fmt.Errorf("target path: %w", err)
	}
	if err := unix.Stat(device, &dev); err != nil {
		return false, nil // gone; nothing can be on it
	}
	number := at.Dev
	if at.Mode&unix.S_IFMT == unix.S_IFBLK {
		number = at.Rdev
	}
	if dev.Mode&unix.S_IFMT == unix.S_IFBLK {
		return number == dev.Rdev, nil
	}
	loops, err := process.LoopHolders(device)
	if err != nil {
		return false, err
	}
	for _, loop := range loops {
		var st unix.Stat_t
		if unix.Stat(loop, &st) == nil && st.Rdev == number {
			return true, nil
		}
	}
	return false, nil
}
