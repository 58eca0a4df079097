package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Image is an image file that is to be written.
type Image struct {
	// Path is of the new image. It must not exist.
	Path string
	// Base is the path of the image of the snapshot that the metadata is based on, or empty. It stays as it is.
	Base string
	// Source is a device or file with the snapshot's data, not smaller than the snapshot.
	Source string
}

// chunk is how many bytes are read at a time.
const chunk = 1 << 20

// Write writes the image: base, if there is one, and over it the ranges of m. Then it compares the whole image with the
// source; that they differ is ErrDataLoss. The image appears under its name when all that is done, and durable.
func (i Image) Write(ctx context.Context, m Metadata) (err error) {
	if (i.Base == "") != (m.Base == "") {
		return fmt.Errorf("an image of changes needs the image that they are based on, and no other does: %w", errdefs.ErrInvalidArgument)
	}
	if m.Capacity <= 0 { // CSI lets a driver that has no ranges to send send nothing at all
		return fmt.Errorf("the driver has not said how large snapshot %s is; make an image of all its data: %w", m.Snapshot, errdefs.ErrFailedPrecondition)
	}
	if _, err := os.Lstat(i.Path); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("image %s: %w", i.Path, errors.Join(err, errdefs.ErrAlreadyExists))
	}
	source, err := os.Open(i.Source)
	if err != nil {
		return err
	}
	defer source.Close()
	if size, err := source.Seek(0, io.SeekEnd); err != nil || size < m.Capacity {
		return fmt.Errorf("source %s has %d bytes, the snapshot %d: %w", i.Source, size, m.Capacity, errors.Join(err, errdefs.ErrInvalidArgument))
	}
	partial, err := os.CreateTemp(filepath.Dir(i.Path), "."+filepath.Base(i.Path)+".")
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, partial.Close())
		if err != nil {
			err = errors.Join(err, os.Remove(partial.Name()))
		}
	}()
	if err := i.fill(ctx, partial, source, m); err != nil {
		return err
	}
	if err := errors.Join(compare(ctx, partial, source, m.Capacity), partial.Sync()); err != nil {
		return err
	}
	if err := os.Link(partial.Name(), i.Path); err != nil { // unlike rename it replaces nothing
		return err
	}
	return errors.Join(os.Remove(partial.Name()), syncDir(filepath.Dir(i.Path)))
}

// fill copies the base and then the ranges.
func (i Image) fill(ctx context.Context, image, source *os.File, m Metadata) error {
	if i.Base != "" {
		base, err := os.Open(i.Base)
		if err != nil {
			return err
		}
		defer base.Close()
		// Where the filesystem cannot share the blocks the data is copied, but not the holes.
		if err := unix.IoctlFileClone(int(image.Fd()), int(base.Fd())); err != nil {
			if err := copyData(ctx, image, base); err != nil {
				return err
			}
		}
	}
	if err := image.Truncate(m.Capacity); err != nil {
		return err
	}
	for _, r := range m.Ranges {
		if err := copyRange(ctx, image, source, r, true); err != nil {
			return err
		}
	}
	return nil
}

// copyData copies what of a file is no hole.
func copyData(ctx context.Context, to, from *os.File) error {
	for offset := int64(0); ; {
		start, err := unix.Seek(int(from.Fd()), offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look for data in %s: %w", from.Name(), err)
		}
		if offset, err = unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE); err != nil {
			return fmt.Errorf("look for data in %s: %w", from.Name(), err)
		}
		if err := copyRange(ctx, to, from, Range{Offset: start, Size: offset - start}, false); err != nil {
			return err
		}
	}
}

// copyRange copies a range. With holes, what is zero becomes a hole: what a guest has discarded has changed, too.
func copyRange(ctx context.Context, to, from *os.File, r Range, holes bool) error {
	buf, zero := make([]byte, chunk), make([]byte, chunk)
	for end := r.Offset + r.Size; r.Offset < end; r.Offset += int64(len(buf)) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		buf = buf[:min(chunk, end-r.Offset)]
		if _, err := from.ReadAt(buf, r.Offset); err != nil {
			return fmt.Errorf("read %s at %d: %w", from.Name(), r.Offset, err)
		}
		if holes && bytes.Equal(buf, zero[:len(buf)]) {
			err := unix.Fallocate(int(to.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Offset, int64(len(buf)))
			if err == nil {
				continue
			}
		}
		if _, err := to.WriteAt(buf, r.Offset); err != nil {
			return fmt.Errorf("write %s at %d: %w", to.Name(), r.Offset, err)
		}
	}
	return nil
}

// compare reads two files.
func compare(ctx context.Context, image, source *os.File, size int64) error {
	a, b := make([]byte, chunk), make([]byte, chunk)
	for offset := int64(0); offset < size; offset += chunk {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		n := min(chunk, size-offset)
		_, imageErr := image.ReadAt(a[:n], offset)
		_, sourceErr := source.ReadAt(b[:n], offset)
		if err := errors.Join(imageErr, sourceErr); err != nil {
			return fmt.Errorf("compare at %d: %w", offset, err)
		}
		if !bytes.Equal(a[:n], b[:n]) {
			return fmt.Errorf("the image differs from %s within %d bytes at %d; is that a volume made from this snapshot, that nobody writes to, and is the base's image that of the base? %w",
				source.Name(), n, offset, errdefs.ErrDataLoss)
		}
	}
	return nil
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
