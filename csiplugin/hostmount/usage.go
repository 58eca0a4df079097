package hostmount

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Usage is how full a filesystem is, as statfs(2) has it.
type Usage struct {
	// Bytes, and Inodes, which a filesystem may not count.
	Bytes, Inodes Amount
	// ReadOnly says that nothing can be written any more, or never could.
	ReadOnly bool
}

// Amount is a number of something.
type Amount struct{ Total, Used, Available int64 }

// UsageAt measures the filesystem that is mounted at a path. If the path is no mount point, or the mount is not one that
// ours reports as such, it is ErrNotFound: never is another filesystem measured instead, whatever happens meanwhile.
func UsageAt(path string, ours func(*Mount) bool) (Usage, error) {
	fd, err := openPath(path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return Usage{}, fmt.Errorf("nothing is mounted at %s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return Usage{}, fmt.Errorf("usage of %s: %w", path, err)
	}
	defer unix.Close(fd)
	m, err := mountOf(fd)
	if err != nil {
		return Usage{}, fmt.Errorf("usage of %s: %w", path, err)
	}
	if m == nil || !ours(m) {
		return Usage{}, fmt.Errorf("the volume is not mounted at %s: %w", path, errdefs.ErrNotFound)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return Usage{}, fmt.Errorf("usage of %s: %w", path, err)
	}
	size := st.Frsize
	return Usage{
		Bytes: Amount{
			Total:     int64(st.Blocks) * size,
			Used:      int64(st.Blocks-st.Bfree) * size,
			Available: int64(st.Bavail) * size,
		},
		Inodes:   Amount{Total: int64(st.Files), Used: int64(st.Files - st.Ffree), Available: int64(st.Ffree)},
		ReadOnly: st.Flags&unix.ST_RDONLY != 0,
	}, nil
}
