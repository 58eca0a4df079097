package reflink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/internal/diskfull"
)

const labelName = "user.crust.label"

// SetLabel writes the attribute.
func (e *Engine) SetLabel(_ context.Context, name engine.Name, label []byte) error {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return err
	}
	if err := errors.Join(relabel(f, label), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("label object %s: %w", name, diskfull.Kind(err))
	}
	return nil
}

// relabel takes the seal off a file for a moment if there is one.
func relabel(f *os.File, label []byte) error {
	sealed, err := isImmutable(f)
	if err != nil || !sealed {
		return errors.Join(err, setLabel(f, label))
	}
	if err := setImmutable(f, false); err != nil {
		return err
	}
	return errors.Join(setLabel(f, label), setImmutable(f, true))
}

func setLabel(f *os.File, label []byte) error {
	if len(label) > engine.MaxLabel {
		return fmt.Errorf("the label has %d bytes, %d are allowed: %w", len(label), engine.MaxLabel, errdefs.ErrInvalidArgument)
	}
	if err := unix.Fsetxattr(int(f.Fd()), labelName, label, 0); err != nil {
		return fmt.Errorf("attribute %s: %w", labelName, err)
	}
	return nil
}

// Label reads the attribute.
func (e *Engine) Label(_ context.Context, name engine.Name) ([]byte, error) {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	label := make([]byte, engine.MaxLabel)
	n, err := unix.Fgetxattr(int(f.Fd()), labelName, label)
	if errors.Is(err, unix.ENODATA) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("label of object %s: %w", name, err)
	}
	return label[:n], nil
}

// Names lists the directory.
func (e *Engine) Names(context.Context) ([]engine.Name, error) {
	entries, err := os.ReadDir(e.dir)
	if err != nil {
		return nil, fmt.Errorf("list objects: %w", err)
	}
	var names []engine.Name
	for _, entry := range entries {
		name, err := engine.ParseName(entry.Name())
		if err == nil && entry.Type().IsRegular() && !strings.HasPrefix(entry.Name(), temporary) {
			names = append(names, name)
		}
	}
	return names, nil
}
