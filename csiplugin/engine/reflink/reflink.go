package reflink

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/internal/diskfull"
)

// temporary is what names begin with that are not objects yet. No object's name begins so.
const temporary = ".new-"

// Engine keeps objects as files of one directory.
type Engine struct {
	dir string
	// hinted says that the filesystem takes hints of how to allocate: it is XFS.
	hinted bool
}

var _ engine.Engine = (*Engine)(nil)

// Open opens the engine in an existing directory, which must be empty or the engine's own. It proves by doing it that
// files can share blocks; where they cannot it is ErrFailedPrecondition. Only an engine with objects is opened without that
// proof if there is no space for it, so that they can be deleted. Unfinished files are removed.
func Open(dir string) (*Engine, error) {
	if err := removeUnfinished(dir); err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	err := Verify(dir)
	if errors.Is(err, errdefs.ErrResourceExhausted) {
		err = hasObjects(dir, err) // they were proof enough when there was space
	}
	if err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	if err := forbidCompression(dir); err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return nil, fmt.Errorf("open engine: %w", err)
	}
	return &Engine{dir: dir, hinted: fs.Type == unix.XFS_SUPER_MAGIC}, nil
}

// noCompression is FS_NOCOMP_FL of linux/fs.h, chattr's +m.
const noCompression = 0x00000400

// forbidCompression marks a directory of btrfs so that files made in it are not compressed, whatever the filesystem is
// mounted with: of compressed extents it cannot be told from where they lie whether two are the same.
func forbidCompression(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(d.Fd()), &fs); err != nil || fs.Type != unix.BTRFS_SUPER_MAGIC {
		return err
	}
	flags, err := unix.IoctlGetInt(int(d.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil || flags&noCompression != 0 {
		return err
	}
	return unix.IoctlSetPointerInt(int(d.Fd()), unix.FS_IOC_SETFLAGS, flags|noCompression)
}

// hasObjects returns otherwise if a directory is empty.
func hasObjects(dir string, otherwise error) error {
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) == 0 {
		return otherwise
	}
	return err
}

// Path is that of the object's file.
func (e *Engine) Path(name engine.Name) string { return filepath.Join(e.dir, string(name)) }

func removeUnfinished(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), temporary) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Verify clones a small file within a directory and compares the copy. A directory of a filesystem that cannot do so is
// ErrFailedPrecondition.
func Verify(dir string) error {
	source, err := os.CreateTemp(dir, temporary+"verify-")
	if err != nil {
		return diskfull.Kind(err)
	}
	defer discard(source)
	clone, err := os.CreateTemp(dir, temporary+"verify-")
	if err != nil {
		return diskfull.Kind(err)
	}
	defer discard(clone)
	// btrfs keeps the data of small files in its tree and never shares it: one block would prove nothing.
	want := make([]byte, 64<<10)
	_, _ = rand.Read(want)
	if _, err := source.Write(want); err != nil {
		return diskfull.Kind(err)
	}
	err = unix.IoctlFileClone(int(clone.Fd()), int(source.Fd()))
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("files in %s cannot share blocks (FICLONE: %w); use XFS made with reflink=1, or btrfs: %w", dir, err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("clone a file in %s: %w", dir, diskfull.Kind(err))
	}
	got := make([]byte, len(want))
	if _, err := clone.ReadAt(got, 0); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("a clone in %s differs from its source: %w", dir, errdefs.ErrDataLoss)
	}
	return nil
}

func discard(f *os.File) {
	_ = f.Close()
	_ = os.Remove(f.Name())
}

// open opens an object's file. Anything but a regular file under the name is not an object.
func (e *Engine) open(name engine.Name, mode int) (*os.File, error) {
	f, err := os.OpenFile(e.Path(name), mode|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("object %s: %w", name, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("object %s: %w", name, err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("object %s: %w", name, err), f.Close())
	}
	if !info.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("object %s is no regular file: %w", name, errdefs.ErrDataLoss), f.Close())
	}
	return f, nil
}

// Stat asks the filesystem for size, allocation and the first data extent.
func (e *Engine) Stat(_ context.Context, name engine.Name) (engine.Stat, error) {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return engine.Stat{}, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return engine.Stat{}, fmt.Errorf("stat object %s: %w", name, err)
	}
	never, err := neverWritten(f)
	if err != nil {
		return engine.Stat{}, fmt.Errorf("data of object %s: %w", name, err)
	}
	return engine.Stat{Size: st.Size, Allocated: 512 * st.Blocks, NeverWritten: never}, nil
}

func neverWritten(f *os.File) (bool, error) {
	_, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return true, nil
	}
	return false, err
}

// Capacity is that of the filesystem.
func (e *Engine) Capacity(context.Context) (engine.Capacity, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(e.dir, &st); err != nil {
		return engine.Capacity{}, fmt.Errorf("capacity of %s: %w", e.dir, err)
	}
	return engine.Capacity{Total: int64(st.Blocks) * st.Bsize, Free: int64(st.Bavail) * st.Bsize}, nil
}
