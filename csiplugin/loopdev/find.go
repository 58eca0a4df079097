package loopdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Attached is a loop device that a file is attached to, as it was a moment ago.
type Attached struct {
	// Path of the device node.
	Path string
	// Rdev is the device number, as stat(2) has it in st_rdev of the node and in st_dev of what is mounted from it.
	Rdev uint64
	// ReadOnly devices refuse writes.
	ReadOnly bool
	// Passing devices go away with their last user.
	Passing bool
}

// Find returns all devices that a file is attached to, by device and inode number. A file that does not exist has none.
func Find(path string) ([]Attached, error) {
	var file unix.Stat_t
	if err := unix.Lstat(path, &file); errors.Is(err, unix.ENOENT) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("loop devices of %s: %w", path, err)
	}
	entries, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var found []Attached
	for _, entry := range entries {
		// The name is only a reason not to open devices of other people; the numbers decide.
		if !namesFile(entry, filepath.Base(path)) {
			continue
		}
		node := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(entry)))
		a, err := attachedTo(node, &file)
		if err != nil {
			return nil, fmt.Errorf("loop devices of %s: %w", path, err)
		}
		if a != nil {
			found = append(found, *a)
		}
	}
	return found, nil
}

func namesFile(entry, base string) bool {
	raw, err := os.ReadFile(entry)
	if err != nil {
		return false // it was detached in between
	}
	return filepath.Base(strings.TrimSpace(string(raw))) == base
}

// attachedTo returns nil if the device has no file or another one.
func attachedTo(node string, file *unix.Stat_t) (*Attached, error) {
	var found *Attached
	err := withDevice(node, file, func(dev *os.File, status *unix.LoopInfo64) error {
		var st unix.Stat_t
		if err := unix.Fstat(int(dev.Fd()), &st); err != nil {
			return fmt.Errorf("stat %s: %w", node, err)
		}
		found = &Attached{
			Path: node, Rdev: st.Rdev,
			ReadOnly: status.Flags&unix.LO_FLAGS_READ_ONLY != 0,
			Passing:  status.Flags&unix.LO_FLAGS_AUTOCLEAR != 0,
		}
		return nil
	})
	return found, err
}

// withDevice opens a device and, if it belongs to file, calls f. While the device is open the kernel does not give it to
// another file, so f can act on it.
func withDevice(node string, file *unix.Stat_t, f func(dev *os.File, status *unix.LoopInfo64) error) error {
	dev, err := os.OpenFile(node, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENXIO) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dev.Close()
	status, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status of %s: %w", node, err)
	}
	if status.Device != file.Dev || status.Inode != file.Ino {
		return nil
	}
	return f(dev, status)
}

// Holds reports whether one of the devices has the given device number.
func Holds(devices []Attached, rdev uint64) bool {
	return slices.ContainsFunc(devices, func(a Attached) bool { return a.Rdev == rdev })
}
