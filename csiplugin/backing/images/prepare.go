package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/convert"
	"crust.dev/crust/csiplugin/backing/download"
	"crust.dev/crust/csiplugin/backing/qcow2"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// undoTimeout is how long undoing may take after what it belongs to has ended.
const undoTimeout = 30 * time.Second

// startDownload begins to prepare an image that is downloaded.
func (s *Store) startDownload(ctx context.Context, h backing.Handle, origin catalog.Origin) (*job, error) {
	if h.Declared() == backing.QCOW2 {
		if err := s.Converter.Ready(); err != nil {
			return nil, err
		}
	}
	img := catalog.Image{
		ID: handle.NewImage(s.Pool), Name: h.Image, State: catalog.Creating, Origin: origin, Source: backing.Download,
		URL: backing.PublicURL(h.URL), Format: h.Declared(), Handle: h.Public().String(), Created: time.Now().UTC(),
	}
	if err := s.intend(ctx, img); err != nil {
		return nil, err
	}
	j, err := s.begin(ctx, img, func(ctx context.Context, j *job) error {
		err := s.fetch(ctx, j, h)
		if err != nil {
			err = errors.Join(err, s.undo(ctx, img))
		}
		return err
	})
	if err != nil {
		err = errors.Join(err, s.undo(ctx, img))
	}
	return j, err
}

func (s *Store) intend(ctx context.Context, img catalog.Image) error {
	if err := s.Catalog.Reserve(); err != nil {
		return err
	}
	if err := s.Catalog.PutImage(img); err != nil {
		return err
	}
	crashpoint.At(ctx, "image intended")
	return nil
}

func (s *Store) undo(ctx context.Context, img catalog.Image) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return s.remove(ctx, img)
}

// fetch downloads an image, looks at it, and makes it an object.
func (s *Store) fetch(ctx context.Context, j *job, h backing.Handle) error {
	img := j.image
	got, err := s.download(ctx, j, h)
	if err != nil {
		return err
	}
	crashpoint.At(ctx, "image downloaded")
	img.Checksum, img.FileSize = got.Checksum, got.Bytes
	raw, size := s.file(img, suffixDownload), got.Bytes
	if img.Format == backing.QCOW2 {
		raw = s.file(img, suffixRaw)
		size, err = s.unpack(ctx, j, raw)
	} else {
		err = checkRaw(s.file(img, suffixDownload))
	}
	if err != nil {
		return err
	}
	crashpoint.At(ctx, "image converted")
	if err := s.checkSize(ctx, size); err != nil {
		return err
	}
	j.at(Progress{Phase: Publishing})
	img.Size, img.State = (size+granule-1)/granule*granule, catalog.Ready
	if err := s.place(ctx, img, raw); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	crashpoint.At(ctx, "image placed")
	if err := s.Seal(ctx, object(img)); err != nil {
		return err
	}
	crashpoint.At(ctx, "image sealed")
	if err := s.Catalog.PutImage(img); err != nil {
		return err
	}
	crashpoint.At(ctx, "image recorded")
	s.tidy(ctx, img)
	return nil
}

// tidy removes the files of an image that is ready. What cannot be removed now is, at the next start.
func (s *Store) tidy(ctx context.Context, img catalog.Image) {
	if err := s.clean(img); err != nil {
		rpc.Logger(ctx).WarnContext(ctx, "files of an image are left", logImage, img.Name, rpc.LogError, err)
	}
}

func (s *Store) download(ctx context.Context, j *job, h backing.Handle) (download.Result, error) {
	f, err := os.OpenFile(s.file(j.image, suffixDownload), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return download.Result{}, err
	}
	got, err := s.Downloads.Get(ctx, h.URL, download.Target{
		File: f, Checksum: h.Checksum, Space: s.space, Progress: s.meter(j, Downloading),
	})
	if err := errors.Join(err, f.Close()); err != nil {
		return got, err
	}
	if got.Bytes == 0 {
		return got, fmt.Errorf("download %s: the file is empty: %w", backing.PublicURL(h.URL), errdefs.ErrInvalidArgument)
	}
	return got, nil
}

// unpack looks at the qcow2 file that was downloaded and converts it to a raw one. It returns the disk's size.
func (s *Store) unpack(ctx context.Context, j *job, raw string) (int64, error) {
	from := s.file(j.image, suffixDownload)
	var info qcow2.Info
	err := look(from, func(file *os.File, size int64) (err error) {
		info, err = qcow2.Inspect(file, size, qcow2.Limits{VirtualSize: s.MaxSize})
		return err
	})
	if err != nil {
		return 0, err
	}
	meter := s.meter(j, Converting)
	return info.VirtualSize, s.Converter.Convert(ctx, convert.Job{
		From: convert.Image{Path: from, Format: backing.QCOW2}, To: convert.Image{Path: raw, Format: backing.Raw},
		VirtualSize: info.VirtualSize, Space: s.space, Progress: func(done int64) { meter(done, info.VirtualSize) },
	})
}

// checkRaw is ErrInvalidArgument for a file that others would take for something else than a raw disk.
func checkRaw(path string) error {
	return look(path, func(file *os.File, size int64) error {
		format, err := qcow2.Container(file, size)
		if err == nil && format != "" {
			err = fmt.Errorf("the image is refused: it is declared to be raw and looks like %s; declare what it is with export-type=qcow2 in the handle, or convert it: %w", format, errdefs.ErrInvalidArgument)
		}
		return err
	})
}

// checkSize is ErrOutOfRange for a disk that is too large for the pool or for the limit.
func (s *Store) checkSize(ctx context.Context, size int64) error {
	c, err := s.Engine.Capacity(ctx)
	if err == nil && size > min(s.MaxSize, c.Total) {
		err = fmt.Errorf("the image has %d bytes, %d are allowed (--image-max-size, and the pool's size): %w", size, min(s.MaxSize, c.Total), errdefs.ErrOutOfRange)
	}
	return err
}

// export converts what was cut for an image to its qcow2 file.
func (s *Store) export(ctx context.Context, j *job) error {
	img := j.image
	if err := s.clean(img); err != nil {
		return err
	}
	copied := s.file(img, suffixRaw)
	if err := s.copyOf(img, copied); err != nil {
		return err
	}
	file := s.file(img, suffixExport)
	meter := s.meter(j, Converting)
	err := s.Converter.Convert(ctx, convert.Job{
		From: convert.Image{Path: copied, Format: backing.Raw}, To: convert.Image{Path: file, Format: backing.QCOW2},
		VirtualSize: img.Size, Space: s.space, Progress: func(done int64) { meter(done, img.Size) },
	})
	if err != nil {
		return errors.Join(err, s.clean(img))
	}
	crashpoint.At(ctx, "export converted")
	j.at(Progress{Phase: Publishing})
	if img, err = s.checkExport(ctx, img, file); err != nil {
		return errors.Join(err, s.clean(j.image))
	}
	if err := errors.Join(os.Rename(file, filepath.Join(s.Dir, exportFile(img))), syncDir(s.Dir)); err != nil {
		return err
	}
	crashpoint.At(ctx, "export renamed")
	img.State = catalog.Ready
	note, err := s.Label(img)
	if err != nil {
		return err
	}
	if err := s.Engine.SetLabel(ctx, object(img), note); err != nil {
		return err
	}
	crashpoint.At(ctx, "export labelled")
	if err := s.Catalog.PutImage(img); err != nil {
		return err
	}
	crashpoint.At(ctx, "export recorded")
	s.tidy(ctx, img)
	return nil
}

// copyOf makes a file that shares the blocks of an image's object, for the child that converts.
func (s *Store) copyOf(img catalog.Image, path string) error {
	from, err := os.Open(s.Engine.Path(object(img)))
	if err != nil {
		return err
	}
	defer from.Close()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	return share(from, path)
}

// checkExport looks at an export as at any other image, and returns the image with what is known of it.
func (s *Store) checkExport(ctx context.Context, img catalog.Image, path string) (catalog.Image, error) {
	err := look(path, func(file *os.File, size int64) error {
		info, err := qcow2.Inspect(file, size, qcow2.Limits{VirtualSize: img.Size})
		if err == nil && info.VirtualSize != img.Size {
			err = fmt.Errorf("the export has %d bytes, the volume %d: %w", info.VirtualSize, img.Size, errdefs.ErrInternal)
		}
		if err != nil {
			return err
		}
		img.FileSize = size
		img.Checksum, err = checksum(ctx, file)
		return err
	})
	return img, err
}
