package filesystem

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Where something is mounted is the host's word, and it is taken literally: a symbolic link on the way could have been
// put there by what runs in the sandbox, to have the mount elsewhere.

// openTarget opens a path (O_PATH) that has no symbolic link in it. ErrNotFound if it does not exist.
func openTarget(name string, flags uint64) (int, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC | flags,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return -1, fmt.Errorf("%s: %w", name, errdefs.ErrNotFound)
	case errors.Is(err, unix.ELOOP):
		return -1, fmt.Errorf("%s has a symbolic link in it, which is not followed: %w", name, errdefs.ErrInvalidArgument)
	case errors.Is(err, unix.ENOTDIR):
		return -1, fmt.Errorf("%s: %w: %w", name, err, errdefs.ErrInvalidArgument)
	case err != nil:
		return -1, fmt.Errorf("%s: %w", name, err)
	}
	return fd, nil
}

// MakeTarget makes what something is to be mounted at, a directory or an empty file, and the directories above it. It
// returns whether it was missing, so that the caller can remove it again.
func MakeTarget(name string, file bool) (made bool, err error) {
	parent, err := makeParents(path.Dir(name))
	if err != nil {
		return false, err
	}
	defer unix.Close(parent)
	if file {
		made, err = makeFileAt(parent, path.Base(name))
	} else {
		made, err = makeDirAt(parent, path.Base(name), 0o755)
	}
	if err != nil {
		return false, fmt.Errorf("make %s: %w", name, err)
	}
	return made, nil
}

// makeParents makes a directory and all above it, and opens it.
func makeParents(name string) (int, error) {
	at, err := openTarget("/", unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	for element := range strings.SplitSeq(strings.Trim(name, "/"), "/") {
		if element == "" {
			continue
		}
		next, err := enterAt(at, element)
		_ = unix.Close(at)
		if err != nil {
			return -1, fmt.Errorf("make %s: %w", name, err)
		}
		at = next
	}
	return at, nil
}

// enterAt makes a directory unless it is there, and opens it; it must not be a symbolic link.
func enterAt(dir int, element string) (int, error) {
	if _, err := makeDirAt(dir, element, 0o755); err != nil {
		return -1, err
	}
	fd, err := unix.Openat(dir, element, unix.O_PATH|unix.O_CLOEXEC|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENOTDIR) {
		return -1, fmt.Errorf("%q is no directory, or a symbolic link: %w", element, errdefs.ErrInvalidArgument)
	}
	return fd, err
}

func makeDirAt(dir int, element string, mode uint32) (made bool, err error) {
	err = unix.Mkdirat(dir, element, mode)
	if errors.Is(err, unix.EEXIST) {
		return false, nil
	}
	return err == nil, err
}

func makeFileAt(dir int, element string) (made bool, err error) {
	fd, err := unix.Openat(dir, element, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o644)
	if errors.Is(err, unix.EEXIST) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, unix.Close(fd)
}

// RemoveTarget removes what MakeTarget has made, if it is empty; otherwise somebody else uses it by now.
func RemoveTarget(name string) { _ = os.Remove(name) }
