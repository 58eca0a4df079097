// Package ownership gives the files of a volume to a supplemental group, with the outcome that Kubernetes' fsGroup has
// (k8s.io/kubernetes/pkg/volume/volume_linux.go).
//
// It goes by file descriptors and follows no symbolic link, so that what is in the volume cannot lead it out.
package ownership

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// What the group gets on top of what there is.
const (
	fileBits = 0o660
	dirBits  = unix.S_ISGID | 0o770
)

// batch is how many names of a directory are held in memory at a time.
const batch = 1024

// Fits says whether a root directory belongs to the group and lets it in; it is the test of the policy OnRootMismatch.
func Fits(root string, gid uint32) (bool, error) {
	var st unix.Stat_t
	if err := unix.Lstat(root, &st); err != nil {
		return false, fmt.Errorf("owner of %s: %w", root, err)
	}
	return st.Gid == gid && st.Mode&dirBits == dirBits, nil
}

// Apply gives everything at and beneath a root directory to the group and lets the group use it. The root comes last, so
// that [Fits] is false until a walk has been to the end.
func Apply(ctx context.Context, root string, gid uint32) error {
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("give %s to group %d: %w", root, gid, err)
	}
	dir := os.NewFile(uintptr(fd), root)
	defer dir.Close()
	if err := walk(ctx, dir, gid); err != nil {
		return fmt.Errorf("give %s to group %d: %w", root, gid, err)
	}
	return nil
}

// walk does everything beneath a directory and then the directory.
func walk(ctx context.Context, dir *os.File, gid uint32) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		entries, err := dir.ReadDir(batch)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := visit(ctx, dir, e.Name(), gid); err != nil {
				return fmt.Errorf("%s/%w", dir.Name(), err)
			}
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return err
	}
	if st.Gid != gid {
		if err := unix.Fchown(int(dir.Fd()), -1, int(gid)); err != nil {
			return err
		}
	}
	if mode := st.Mode & 0o7777; mode|dirBits != mode || st.Gid != gid {
		return unix.Fchmod(int(dir.Fd()), mode|dirBits)
	}
	return nil
}

// visit does one entry of a directory.
func visit(ctx context.Context, dir *os.File, name string, gid uint32) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		sub := os.NewFile(uintptr(fd), name)
		defer sub.Close()
		return walk(ctx, sub, gid)
	}
	if st.Gid != gid {
		if err := unix.Fchownat(int(dir.Fd()), name, -1, int(gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return nil // it has no mode of its own, and chmod would go through to its target
	}
	// A change of the owner takes set-user-id and set-group-id away; the mode that was there is set again.
	if mode := st.Mode & 0o7777; mode|fileBits != mode || st.Gid != gid {
		if err := unix.Fchmodat(int(dir.Fd()), name, mode|fileBits, 0); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
