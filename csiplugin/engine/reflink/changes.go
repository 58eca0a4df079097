package reflink

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/extents"
	"crust.dev/crust/csiplugin/internal/fileattr"
)

var _ engine.Changes = (*Engine)(nil)

// Seal makes the file immutable.
func (e *Engine) Seal(_ context.Context, name engine.Name) error {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return err
	}
	err = errors.Join(setImmutable(f, true), f.Close())
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("seal object %s: it takes CAP_LINUX_IMMUTABLE to make a file immutable: %w: %w", name, err, errdefs.ErrPermissionDenied)
	}
	if err != nil {
		return fmt.Errorf("seal object %s: %w", name, err)
	}
	return nil
}

func isImmutable(f *os.File) (bool, error) {
	attr, err := fileattr.Get(f)
	return attr.Flags&fileattr.Immutable != 0, err
}

// setImmutable marks a file as immutable or takes the mark off, durably.
func setImmutable(f *os.File, on bool) error {
	attr, err := fileattr.Get(f)
	if err != nil || attr.Flags&fileattr.Immutable != 0 == on {
		return err
	}
	attr.Flags ^= fileattr.Immutable
	return errors.Join(fileattr.Set(f, attr), f.Sync())
}

// Data reads the file's extent map.
func (e *Engine) Data(ctx context.Context, name engine.Name, from int64, emit func(engine.Range) error) error {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := extents.Data(ctx, f, blockOf(from), emit); err != nil {
		return fmt.Errorf("data of object %s: %w", name, err)
	}
	return nil
}

// Changed compares the files' extent maps.
func (e *Engine) Changed(ctx context.Context, base, target engine.Name, from int64, emit func(engine.Range) error) error {
	b, err := e.open(base, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer b.Close()
	t, err := e.open(target, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer t.Close()
	if err := extents.Compare(ctx, b, t, blockOf(from), emit); err != nil {
		return fmt.Errorf("changes of object %s since %s: %w", target, base, err)
	}
	return nil
}

// blockOf is where the block begins that an offset is in.
func blockOf(offset int64) int64 { return offset &^ 4095 }
