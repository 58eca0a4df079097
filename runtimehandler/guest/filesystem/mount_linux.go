package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Mount mounts a filesystem at a directory, which must exist and have no symbolic link on its way. When it fails nothing
// is mounted, and the error has the kernel's own words. ErrInvalidArgument if the filesystem does not know an option;
// ErrDataLoss if it is damaged.
func Mount(ctx context.Context, device, fsType, target string, o Options) error {
	k, err := kindOf(fsType)
	if err != nil {
		return err
	}
	log := openKernelLog()
	defer log.close()
	tree, err := superblock(device, fsType, o.withDefaults(k.options))
	if err != nil {
		if said := log.about(filepath.Base(device)); len(said) > 0 {
			err = fmt.Errorf("%w; the kernel says: %s", err, strings.Join(said, "; "))
		}
		if errors.Is(err, errdefs.ErrDataLoss) {
			err = fmt.Errorf("the filesystem is damaged; restore a backup, or take a copy of the device and repair that: %w", err)
			if fsType == "xfs" {
				err = fmt.Errorf("%w; %s", err, diagnose(ctx, device))
			}
		}
		return fmt.Errorf("mount %s: %w", device, err)
	}
	defer unix.Close(tree)
	return attach(tree, target)
}

// superblock configures and creates a filesystem's superblock, and returns a mount of it that is nowhere yet.
func superblock(device, fsType string, o Options) (int, error) {
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen: the kernel lacks %s: %w: %w", fsType, err, errdefs.ErrNotImplemented)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "source", device); err != nil {
		return -1, fsError(fs, "source", err)
	}
	for _, p := range append(o.generic[:len(o.generic):len(o.generic)], o.specific...) {
		set := unix.FsconfigSetString
		if p.flag {
			set = func(fd int, key, _ string) error { return unix.FsconfigSetFlag(fd, key) }
		}
		if err := set(fs, p.key, p.value); err != nil {
			return -1, fmt.Errorf("mount option %q: %w: %w", p.String(), fsError(fs, "fsconfig", err), errdefs.ErrInvalidArgument)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, createError(fsError(fs, "create superblock", err), err)
	}
	tree, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(o.attributes))
	if err != nil {
		return -1, fsError(fs, "fsmount", err)
	}
	return tree, nil
}

// createError adds the kind to an error of the step that reads the filesystem.
func createError(err error, errno error) error {
	switch {
	case errors.Is(errno, unix.EUCLEAN), errors.Is(errno, unix.EBADMSG), errors.Is(errno, unix.ENOTRECOVERABLE):
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	case errors.Is(errno, unix.EROFS):
		return fmt.Errorf("%w: publish the volume read-write once, so that its log can be replayed: %w", err, errdefs.ErrFailedPrecondition)
	case errors.Is(errno, unix.EIO):
		return fmt.Errorf("%w: the device does not read or write: %w", err, errdefs.ErrUnavailable)
	case errors.Is(errno, unix.ENOMEM):
		return fmt.Errorf("%w: the sandbox needs more memory: %w", err, errdefs.ErrResourceExhausted)
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
}

// fsError adds what the kernel has written into the filesystem's context (fsopen(2)).
func fsError(fs int, step string, err error) error {
	var said []string
	buf := make([]byte, os.Getpagesize())
	for {
		n, err := unix.Read(fs, buf)
		if err != nil || n <= 0 {
			break
		}
		// A message begins with its level and a space: "e ", "w " or "i ".
		_, text, _ := strings.Cut(strings.TrimSpace(string(buf[:n])), " ")
		said = append(said, text)
	}
	if len(said) > 0 {
		return fmt.Errorf("%s: %w (%s)", step, err, strings.Join(said, "; "))
	}
	return fmt.Errorf("%s: %w", step, err)
}

// attach puts a mount at a directory or file.
func attach(tree int, target string) error {
	fd, err := openTarget(target, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(tree, "", fd, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount at %s: %w", target, err)
	}
	return nil
}

// Unmount writes everything to the device and removes the mount at a path. ErrFailedPrecondition if it is in use; it is
// then as it was. Nothing mounted there is success.
func Unmount(target string) error {
	mounted, err := IsMountPoint(target)
	if err != nil || !mounted {
		return err
	}
	if err := syncFilesystem(target); err != nil && !errors.Is(err, unix.EIO) {
		return fmt.Errorf("sync %s: %w", target, err)
	} // A filesystem that was shut down cannot be synced, and has to be let go all the same.
	return removeMount(target)
}

func syncFilesystem(target string) error {
	root, err := os.Open(target)
	if err != nil {
		return err
	}
	defer root.Close()
	return unix.Syncfs(int(root.Fd()))
}

func removeMount(target string) error {
	err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("unmount %s: it is in use: %w", target, errdefs.ErrFailedPrecondition)
	case err != nil && !errors.Is(err, unix.EINVAL): // EINVAL: it is no mount point (any more)
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return nil
}

// IsMountPoint says whether something is mounted at a path. A path that does not exist is none.
func IsMountPoint(name string) (bool, error) {
	here, err := mountID(name)
	if errors.Is(err, errdefs.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("mount at %s: %w", name, err)
	}
	above, err := mountID(path.Dir(name))
	if err != nil {
		return false, fmt.Errorf("mount at %s: %w", name, err)
	}
	return here != above, nil
}

// mountID is the kernel's id of the mount that a path is in. It is taken from the open file (proc_pid_fdinfo(5)) and not
// from statx(2), which asks the filesystem, and one that was shut down does not answer.
func mountID(name string) (string, error) {
	fd, err := openTarget(name, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(info)) {
		if id, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			return strings.TrimSpace(id), nil
		}
	}
	return "", fmt.Errorf("the kernel does not say in which mount it is: %w", errdefs.ErrNotImplemented)
}
