package reflink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/internal/diskfull"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// Create makes the file beside its name and renames it into place.
func (e *Engine) Create(ctx context.Context, name engine.Name, size int64, label []byte) error {
	if err := e.create(ctx, name, size, label); err != nil {
		return fmt.Errorf("create object %s: %w", name, diskfull.Kind(err))
	}
	return nil
}

func (e *Engine) create(ctx context.Context, name engine.Name, size int64, label []byte) error {
	st, err := e.Stat(ctx, name)
	switch {
	case err == nil && st.Size == size && st.NeverWritten:
		// The rename of a process that died may not be durable yet.
		return errors.Join(e.SetLabel(ctx, name, label), syncDir(e.dir))
	case err == nil:
		return fmt.Errorf("it exists with %d bytes, never written %t: %w", st.Size, st.NeverWritten, errdefs.ErrAlreadyExists)
	case !errors.Is(err, errdefs.ErrNotFound):
		return err
	}
	return e.place(ctx, name, label, func(f *os.File) error { return truncate(f, size) })
}

// place makes a file under a temporary name, lets fill give it its content, and puts it in its place when that is durable.
func (e *Engine) place(ctx context.Context, name engine.Name, label []byte, fill func(*os.File) error) error {
	unfinished := filepath.Join(e.dir, temporary+string(name))
	if err := removeIfThere(unfinished); err != nil {
		return err
	}
	if err := e.prepare(ctx, unfinished, label, fill); err != nil {
		return errors.Join(err, removeIfThere(unfinished))
	}
	crashpoint.At(ctx, "object file made under its temporary name")
	if err := os.Rename(unfinished, e.Path(name)); err != nil {
		return errors.Join(err, removeIfThere(unfinished))
	}
	crashpoint.At(ctx, "object file renamed")
	return syncDir(e.dir)
}

func (e *Engine) prepare(ctx context.Context, path string, label []byte, fill func(*os.File) error) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	crashpoint.At(ctx, "object file empty")
	err = errors.Join(e.hint(f), setLabel(f, label))
	if err == nil {
		err = fill(f)
	}
	return errors.Join(err, f.Sync(), f.Close())
}

func truncate(f *os.File, size int64) error {
	err := f.Truncate(size)
	if errors.Is(err, unix.EFBIG) {
		return fmt.Errorf("%d bytes: %w: %w", size, err, errdefs.ErrOutOfRange)
	}
	return err
}

// Clone has the filesystem share the source's blocks with a new file.
func (e *Engine) Clone(ctx context.Context, from, to engine.Name, size int64, label []byte) error {
	if err := e.clone(ctx, from, to, size, label); err != nil {
		return fmt.Errorf("clone object %s to %s: %w", from, to, diskfull.Kind(err))
	}
	return nil
}

func (e *Engine) clone(ctx context.Context, from, to engine.Name, size int64, label []byte) error {
	source, err := e.open(from, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	if info.Size() > size {
		return fmt.Errorf("%d bytes are asked for, the source has %d: %w", size, info.Size(), errdefs.ErrOutOfRange)
	}
	if _, err := os.Lstat(e.Path(to)); !errors.Is(err, os.ErrNotExist) {
		return errors.Join(err, errdefs.ErrAlreadyExists)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return e.place(ctx, to, label, func(f *os.File) error {
		// It writes back what the source has in the page cache first (vfs_clone_file_range, generic_remap_file_range_prep).
		if err := unix.IoctlFileClone(int(f.Fd()), int(source.Fd())); err != nil {
			return fmt.Errorf("FICLONE: %w", err)
		}
		crashpoint.At(ctx, "object cloned")
		return truncate(f, size)
	})
}

// Grow extends the file.
func (e *Engine) Grow(_ context.Context, name engine.Name, size int64) error {
	f, err := e.open(name, os.O_RDWR)
	if err != nil {
		return fmt.Errorf("grow: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("grow object %s: %w", name, err)
	}
	if info.Size() < size {
		err = truncate(f, size)
	}
	if err := errors.Join(err, f.Sync()); err != nil {
		return fmt.Errorf("grow object %s: %w", name, diskfull.Kind(err))
	}
	return nil
}

// Erase punches one hole into the whole file, under a lease that keeps everybody else out.
func (e *Engine) Erase(ctx context.Context, name engine.Name) error {
	return e.exclusively(ctx, name, os.O_RDWR, func(f *os.File) error {
		info, err := f.Stat()
		if err != nil {
			return fmt.Errorf("erase object %s: %w", name, err)
		}
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, info.Size())
		crashpoint.At(ctx, "object punched")
		if err := errors.Join(err, f.Sync()); err != nil {
			return fmt.Errorf("erase object %s: %w", name, diskfull.Kind(err))
		}
		never, err := neverWritten(f)
		if err != nil {
			return fmt.Errorf("erase object %s: %w", name, err)
		}
		if !never {
			return fmt.Errorf("erase object %s: it still has data: %w", name, errdefs.ErrInternal)
		}
		return nil
	})
}

// Delete unlinks the file, under a lease that keeps everybody else out.
func (e *Engine) Delete(ctx context.Context, name engine.Name) error {
	err := e.exclusively(ctx, name, os.O_RDONLY, func(f *os.File) error {
		err := setImmutable(f, false)
		crashpoint.At(ctx, "object unsealed")
		if err == nil {
			err = os.Remove(e.Path(name))
		}
		if err != nil {
			return fmt.Errorf("delete object %s: %w", name, err)
		}
		return nil
	})
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	crashpoint.At(ctx, "object file unlinked")
	if err := errors.Join(removeIfThere(filepath.Join(e.dir, temporary+string(name))), syncDir(e.dir)); err != nil {
		return fmt.Errorf("delete object %s: %w", name, err)
	}
	return nil
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
