package filesystem

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// beneath is how a path inside a volume is resolved. Symbolic links are followed as long as they stay in the volume, and
// an absolute one is an attempt to leave: RESOLVE_IN_ROOT would quietly read it as relative to the volume's root, which
// is not what whoever wrote it meant, and not what the kubelet does, which refuses it as well.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// Source is a directory or regular file of a mounted volume, held open, so that nobody can put something else in its
// place.
type Source struct {
	fd   int
	File bool // a regular file, not a directory
}

// Close lets go of the source.
func (s Source) Close() { _ = unix.Close(s.fd) }

// OpenSource opens a path beneath the root of a mounted volume; empty is the root itself. Directories that are missing
// are made, with the mode of the volume's root, as the kubelet does for a subPath. ErrFailedPrecondition if the path
// leads out of the volume, or to something that is neither a directory nor a regular file.
func OpenSource(root, subPath string) (Source, error) {
	fail := func(err error) (Source, error) {
		return Source{}, fmt.Errorf("path %q in the volume: %w", subPath, err)
	}
	rootFD, err := openTarget(root, unix.O_DIRECTORY)
	if err != nil {
		return Source{}, err
	}
	defer unix.Close(rootFD)
	fd, err := openBeneath(rootFD, subPath)
	if errors.Is(err, unix.ENOENT) {
		if err = makeBeneath(rootFD, subPath); err == nil {
			fd, err = openBeneath(rootFD, subPath)
		}
	}
	if err != nil {
		return fail(sourceError(err))
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return fail(err)
	}
	s := Source{fd: fd, File: st.Mode&unix.S_IFMT == unix.S_IFREG}
	if !s.File && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		s.Close()
		return fail(fmt.Errorf("it is neither a directory nor a regular file: %w", errdefs.ErrFailedPrecondition))
	}
	return s, nil
}

func openBeneath(root int, name string) (int, error) {
	if name == "" {
		name = "."
	}
	return unix.Openat2(root, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: beneath})
}

// makeBeneath makes the directories of a path that are missing.
func makeBeneath(root int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return err
	}
	parent := ""
	for element := range strings.SplitSeq(name, "/") {
		current := path.Join(parent, element)
		fd, err := openBeneath(root, current)
		if errors.Is(err, unix.ENOENT) {
			err = makeOneBeneath(root, parent, element, st.Mode&0o7777)
		} else if err == nil {
			err = unix.Close(fd)
		}
		if err != nil {
			return err
		}
		parent = current
	}
	return nil
}

func makeOneBeneath(root int, parent, element string, mode uint32) error {
	dir, err := openBeneath(root, parent)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Mkdirat(dir, element, mode&0o777); err != nil {
		return err // EEXIST: a symbolic link that leads nowhere
	}
	made, err := unix.Openat(dir, element, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(made)
	return unix.Fchmod(made, mode) // mkdir(2) takes neither the set-group-id bit nor, past the umask, all of the rest
}

func sourceError(err error) error {
	switch {
	case errors.Is(err, unix.EXDEV):
		return fmt.Errorf("it leads out of the volume: %w", errdefs.ErrFailedPrecondition)
	case errors.Is(err, unix.EEXIST), errors.Is(err, unix.ELOOP):
		return fmt.Errorf("it has a symbolic link that leads nowhere: %w", errdefs.ErrFailedPrecondition)
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("a part of it is not a directory: %w", errdefs.ErrFailedPrecondition)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("it does not exist, and cannot be made on a read-only volume: %w", errdefs.ErrFailedPrecondition)
	}
	return err
}

// Bind makes a source appear at a target, a directory or file as the source is.
func Bind(s Source, target string, readOnly bool) error {
	tree, err := unix.OpenTree(s.fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
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
	return attach(tree, target)
}
