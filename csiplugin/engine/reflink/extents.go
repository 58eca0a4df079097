package reflink

import (
	"context"
	"fmt"
	"os"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/extents"
	"crust.dev/crust/csiplugin/internal/fileattr"
)

// extentSize is the hint for new files, in bytes; see doc.go.
const extentSize = 64 << 10

// hint asks the filesystem to allocate in pieces of extentSize. The file must be empty. Where there is no such hint
// nothing happens.
func (e *Engine) hint(f *os.File) error {
	if !e.hinted {
		return nil
	}
	attr, err := fileattr.Get(f)
	if err != nil {
		return err
	}
	attr.Flags |= fileattr.ExtentSize
	attr.ExtentSize = extentSize
	if err := fileattr.Set(f, attr); err != nil {
		return fmt.Errorf("extent size hint: %w", err)
	}
	return nil
}

// Extents asks for the extent map. What a filesystem reports in two pieces although they adjoin is two pieces.
func (e *Engine) Extents(ctx context.Context, name engine.Name) (engine.Extents, error) {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return engine.Extents{}, err
	}
	defer f.Close()
	found, err := extents.Measure(ctx, f)
	if err != nil {
		return engine.Extents{}, fmt.Errorf("extents of object %s: %w", name, err)
	}
	return engine.Extents{Count: found.Extents, Allocated: found.Allocated, Shared: found.Shared}, nil
}
