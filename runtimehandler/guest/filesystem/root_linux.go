package filesystem

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"
)

// sharedRoot is where the directories are that containers share; it is in memory.
const sharedRoot = "/run/crust/shared"

// RootMount is something that a container sees beneath its root.
type RootMount struct {
	// Destination is the path in the container, without symbolic links.
	Destination string
	// Shared names a directory in memory that all containers see that name it; empty: what the root has there.
	Shared string
	// ReadOnly has every write of the container fail.
	ReadOnly bool
}

// kernelMounts are what the OCI runtime specification wants in every container (config-linux.md, "Default Filesystems").
var kernelMounts = []struct {
	source, target, fsType string
	flags                  uintptr
	options                string
}{
	{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_RDONLY, ""},
	{"tmpfs", "/dev", "tmpfs", unix.MS_NOSUID | unix.MS_STRICTATIME, "mode=0755,size=64k"},
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,mode=0620,ptmxmode=0666,gid=5"},
	{"/dev/shm", "/dev/shm", "", unix.MS_BIND, ""},
}

// devices are what the same document calls default devices.
var devices = []struct {
	name         string
	major, minor uint32
}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}

var deviceLinks = map[string]string{
	"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
}

// PrepareRoot mounts beneath a mounted volume what a container's programs expect, and then mounts, in their order. It
// returns the mount points in the order in which they were made. When it fails nothing of it is left mounted.
func PrepareRoot(root string, mounts []RootMount) (made []string, err error) {
	defer func() {
		if err == nil {
			return
		}
		for _, target := range slices.Backward(made) {
			err = errors.Join(err, Unmount(target))
		}
		made = nil
	}()
	for _, m := range kernelMounts {
		target := path.Join(root, m.target)
		if err := mountKernel(m.source, target, m.fsType, m.flags, m.options); err != nil {
			return made, err
		}
		made = append(made, target)
		if m.target == "/dev" {
			if err := fillDev(target); err != nil {
				return made, err
			}
		}
	}
	for _, m := range mounts {
		target := path.Join(root, m.Destination)
		if err := mountInRoot(root, target, m); err != nil {
			return made, fmt.Errorf("%s: %w", m.Destination, err)
		}
		made = append(made, target)
	}
	return made, nil
}

// mountKernel mounts without following a symbolic link.
func mountKernel(source, target, fsType string, flags uintptr, options string) error {
	if _, err := MakeTarget(target, false); err != nil {
		return err
	}
	fd, err := openTarget(target, unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Mount(source, fmt.Sprintf("/proc/self/fd/%d", fd), fsType, flags, options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	return nil
}

// fillDev makes the devices of a container in an empty directory of ours.
func fillDev(dir string) error {
	for _, d := range devices {
		name := path.Join(dir, d.name)
		if err := unix.Mknod(name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make %s: %w", name, err)
		}
		if err := os.Chmod(name, 0o666); err != nil { // past the umask
			return err
		}
	}
	for name, target := range deviceLinks {
		if err := os.Symlink(target, path.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func mountInRoot(root, target string, m RootMount) error {
	from, name := root, m.Destination[1:]
	if m.Shared != "" {
		from, name = sharedRoot, m.Shared
		if err := makeShared(path.Join(sharedRoot, m.Shared)); err != nil {
			return err
		}
	}
	source, err := OpenSource(from, name)
	if err != nil {
		return err
	}
	defer source.Close()
	if _, err := MakeTarget(target, source.File); err != nil {
		return err
	}
	return Bind(source, target, m.ReadOnly)
}

// makeShared makes a directory that is as open as the kubelet's empty directories.
func makeShared(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.Chmod(dir, 0o777)
}
