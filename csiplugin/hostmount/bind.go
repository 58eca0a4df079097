package hostmount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Bind binds a mounted directory, or a device node, to an existing target of the same kind. The bind is complete when it
// appears.
func Bind(source, target string, readOnly bool) error {
	if err := bind(source, target, readOnly); err != nil {
		return fmt.Errorf("bind %s to %s: %w", source, target, err)
	}
	return nil
}

func bind(source, target string, readOnly bool) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(tree)
	if readOnly {
		attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attr); err != nil {
			return fmt.Errorf("mount_setattr: %w", err)
		}
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// CheckTarget reports whether a target can be published to: its parent must be a directory, and at the target there must
// be nothing, or an empty directory, or, for a file, an empty regular file. Anything else is ErrFailedPrecondition.
func CheckTarget(target string, file bool) error {
	refuse := func(text string) error {
		return fmt.Errorf("target path %s %s: %w", target, text, errdefs.ErrFailedPrecondition)
	}
	info, err := os.Lstat(target)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return checkParent(target)
	case err != nil:
		return fmt.Errorf("target path: %w", err)
	case file && (!info.Mode().IsRegular() || info.Size() > 0):
		return refuse("is there and is not an empty file; remove it")
	case !file && !info.IsDir():
		return refuse("is there and is not a directory; remove it")
	case file:
		return nil
	}
	entries, err := os.ReadDir(target)
	if err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	if len(entries) > 0 {
		return refuse(fmt.Sprintf("is a directory that holds %q; a mount would hide it; move it away", entries[0].Name()))
	}
	return nil
}

func checkParent(target string) error {
	parent := filepath.Dir(target)
	if info, err := os.Stat(parent); err != nil || !info.IsDir() {
		return fmt.Errorf("target path %s: its parent is not a directory, and making that is the CO's part: %w", target, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// MakeTarget makes the target, a directory or an empty file, unless it is there.
func MakeTarget(target string, file bool) error {
	if !file {
		if err := os.Mkdir(target, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("target path: %w", err)
		}
		return nil
	}
	f, err := os.OpenFile(target, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	return f.Close()
}

// RemoveTarget removes what MakeTarget has made. It is success if nothing is there; a directory that is not empty, or a
// mount, is ErrFailedPrecondition.
func RemoveTarget(target string) error {
	err := os.Remove(target)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	switch {
	case errors.Is(err, unix.ENOTEMPTY):
		return fmt.Errorf("remove target path: %w; move away what is in it: %w", err, errdefs.ErrFailedPrecondition)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("remove target path: %w; something else is mounted there, unmount it: %w", err, errdefs.ErrFailedPrecondition)
	}
	return fmt.Errorf("remove target path: %w", err)
}
