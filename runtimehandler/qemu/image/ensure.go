package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// keyDigits of the digest name a file.
const keyDigits = 32

// Image is what a microVM boots.
type Image struct {
	Kernel string // path of the kernel
	Initrd string // path of the initramfs
}

// Ensure returns the image of a configuration from a directory, and makes it if it is not there. Images are named by
// what is in them, so one is never changed, and several processes may share a directory. Nothing is ever removed from it.
func Ensure(ctx context.Context, c Config, dir string) (Image, error) {
	t, err := plan(ctx, c)
	if err != nil {
		return Image{}, err
	}
	key, err := t.digest()
	if err != nil {
		return Image{}, err
	}
	image := Image{Kernel: c.Kernel.Image, Initrd: filepath.Join(dir, "initrd-"+key[:keyDigits]+".cpio")}
	if _, err := os.Stat(image.Initrd); err == nil {
		return image, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return Image{}, fmt.Errorf("guest image: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Image{}, fmt.Errorf("guest image: %w", err)
	}
	return image, store(t, image.Initrd)
}

// store writes the tree to a file, whole or not at all.
func store(t tree, path string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".initrd-")
	if err != nil {
		return fmt.Errorf("guest image: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("guest image: %w", err), os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(t.write(f), f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
