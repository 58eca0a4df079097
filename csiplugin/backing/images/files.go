package images

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/internal/diskfull"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// granule is what the sizes of objects are a multiple of (engine.Engine, Create).
const granule = 4096

// exportFile is the name of the file that a qcow2 export has.
func exportFile(img catalog.Image) string { return img.ID.String() + ".qcow2" }

// ExportPath is where the file of an export to qcow2 is, or empty if an image has none.
func (s *Store) ExportPath(img catalog.Image) string {
	if img.Source != backing.Export || img.Format != backing.QCOW2 || img.State != catalog.Ready {
		return ""
	}
	return filepath.Join(s.Dir, exportFile(img))
}

// The suffixes of files in the making.
const (
	suffixDownload = ".download"
	suffixRaw      = ".raw"
	suffixExport   = ".export"
)

func (s *Store) file(img catalog.Image, suffix string) string {
	return filepath.Join(s.Dir, img.ID.String()+suffix)
}

// sweep removes all files but some.
func (s *Store) sweep(keep map[string]bool) error {
	entries, err := os.ReadDir(s.Dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !keep[entry.Name()] {
			if err := os.Remove(filepath.Join(s.Dir, entry.Name())); err != nil {
				return fmt.Errorf("remove what is left of an image: %w", err)
			}
		}
	}
	return nil
}

// clean removes the files of an image, but not the finished export of one that is ready.
func (s *Store) clean(img catalog.Image) error {
	var errs []error
	for _, suffix := range []string{suffixDownload, suffixRaw, suffixExport} {
		if err := os.Remove(s.file(img, suffix)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if img.State != catalog.Ready {
		if err := os.Remove(filepath.Join(s.Dir, exportFile(img))); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// place makes the object of an image from a raw file, which is extended to the object's size.
func (s *Store) place(ctx context.Context, img catalog.Image, path string) error {
	from, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := from.Truncate(img.Size); err != nil {
		return diskfull.Kind(err)
	}
	// The label comes last: without one nobody takes the object for whole.
	if err := s.Engine.Create(ctx, object(img), img.Size, nil); err != nil {
		return err
	}
	crashpoint.At(ctx, "object of the image made")
	if err := share(from, s.Engine.Path(object(img))); err != nil {
		return fmt.Errorf("object %s: %w", img.ID, diskfull.Kind(err))
	}
	crashpoint.At(ctx, "object of the image filled")
	note, err := s.Label(img)
	if err != nil {
		return err
	}
	return s.Engine.SetLabel(ctx, object(img), note)
}

// share has a file share all blocks of another one.
func share(from *os.File, to string) error {
	f, err := os.OpenFile(to, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	if err := unix.IoctlFileClone(int(f.Fd()), int(from.Fd())); err != nil {
		return errors.Join(fmt.Errorf("FICLONE: %w", err), f.Close())
	}
	return errors.Join(f.Sync(), f.Close())
}

// look opens a file and calls f with it and its size.
func look(path string, f func(file *os.File, size int64) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	return f(file, info.Size())
}

// checksum is the SHA-512 of a file.
func checksum(ctx context.Context, file io.Reader) (string, error) {
	sum := sha512.New()
	buffer := make([]byte, 1<<20)
	for ctx.Err() == nil {
		n, err := file.Read(buffer)
		_, _ = sum.Write(buffer[:n]) // it never returns an error
		if errors.Is(err, io.EOF) {
			return hex.EncodeToString(sum.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
	}
	return "", context.Cause(ctx)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
