package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Holder is a process, or a loop device, that has a device open.
type Holder struct {
	PID     int // 0 for a loop device
	Command string
}

// String is for error texts.
func (h Holder) String() string {
	if h.PID == 0 {
		return h.Command
	}
	return fmt.Sprintf("%s (pid %d)", h.Command, h.PID)
}

// Holders returns the processes that have the block device or image file at path open, ours excepted, and for an image
// file also "loop" holders: loop devices that it backs. It sees all processes only in the host's pid namespace and as
// root. A path that does not exist has no holders.
func Holders(path string) ([]Holder, error) {
	var want unix.Stat_t
	if err := unix.Stat(path, &want); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, fmt.Errorf("holders of %s: %w", path, err)
	}
	loops, err := LoopHolders(path)
	if err != nil {
		return nil, err
	}
	var holders []Holder
	for _, device := range loops {
		holders = append(holders, Holder{Command: "loop device " + device})
	}
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("holders of %s: %w", path, err)
	}
	for _, proc := range procs {
		pid, err := strconv.Atoi(proc.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if holds(pid, want) {
			holders = append(holders, Holder{PID: pid, Command: command(pid)})
		}
	}
	return holders, nil
}

// holds looks through the descriptors of one process. A process that ends meanwhile holds nothing.
func holds(pid int, want unix.Stat_t) bool {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, fd := range fds {
		var have unix.Stat_t
		if unix.Stat(filepath.Join(dir, fd.Name()), &have) == nil && same(have, want) {
			return true
		}
	}
	return false
}

// same says whether two files are the same device, or the same file.
func same(a, b unix.Stat_t) bool {
	if a.Mode&unix.S_IFMT != b.Mode&unix.S_IFMT {
		return false
	}
	if a.Mode&unix.S_IFMT == unix.S_IFBLK {
		return a.Rdev == b.Rdev
	}
	return a.Dev == b.Dev && a.Ino == b.Ino
}

// LoopHolders returns the paths of the loop devices over an image file; for anything else there are none. The kernel's
// own note of the backing inode is used, as its path may be that of another mount namespace.
func LoopHolders(path string) ([]string, error) {
	var want unix.Stat_t
	if err := unix.Stat(path, &want); err != nil {
		return nil, fmt.Errorf("loop devices of %s: %w", path, err)
	}
	if want.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, nil
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, fmt.Errorf("holders of %s: %w", path, err)
	}
	var devices []string
	for _, dir := range attached {
		device := "/dev/" + filepath.Base(filepath.Dir(dir))
		info, err := loopInfo(device)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
			continue // detached meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("holders of %s: %s: %w", path, device, err)
		}
		if info.Device == want.Dev && info.Inode == want.Ino {
			devices = append(devices, device)
		}
	}
	return devices, nil
}

func loopInfo(device string) (*unix.LoopInfo64, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return unix.IoctlLoopGetStatus64(int(f.Fd()))
}

func command(pid int) string {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(raw))
}
