package images

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/qcow2"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// patience is how long a call waits for an image that is being prepared before it is told to ask again.
const patience = 5 * time.Second

func lockOf(name string) string { return "image " + name }

// Hold returns the image that a handle stands for and keeps it from being deleted until release is called, once. One that is
// not there is prepared, if the handle says how. Errors: ErrAborted while it is being prepared, with how far that is;
// ErrNotFound if it is not there and cannot be prepared; ErrInvalidArgument if there is another one of its name; those of
// preparing it.
func (s *Store) Hold(ctx context.Context, h backing.Handle) (img catalog.Image, release func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		j, err := s.look(context.WithoutCancel(ctx), h, catalog.OnDemand)
		if err != nil {
			return img, nil, err
		}
		if j == nil {
			return s.share(h)
		}
		select {
		case <-j.done:
		case <-ctx.Done():
			return img, nil, fmt.Errorf("image %q is being prepared (%s); ask again: %w", h.Image, j.progress.Load(), errdefs.ErrAborted)
		}
	}
}

// Prepare begins to prepare the image that a handle stands for, for the operator, unless it is there. Errors are those of
// [Store.Hold], but not ErrAborted while it is being prepared.
func (s *Store) Prepare(ctx context.Context, h backing.Handle) error {
	_, err := s.look(ctx, h, catalog.ByOperator)
	return err
}

func (s *Store) share(h backing.Handle) (img catalog.Image, release func(), err error) {
	if release, err = s.Share(lockOf(h.Image)); err != nil {
		return img, nil, err
	}
	img, err = s.Catalog.ImageNamed(h.Image)
	if err == nil && img.State != catalog.Ready {
		err = fmt.Errorf("image %q is not ready any more; ask again: %w", h.Image, errdefs.ErrAborted)
	}
	if err == nil {
		err = s.fits(img, h)
	}
	if err != nil {
		release()
		return img, nil, err
	}
	return img, release, nil
}

// look returns the job that prepares an image, which it begins if need be, or nil if the image is ready.
func (s *Store) look(ctx context.Context, h backing.Handle, origin catalog.Origin) (*job, error) {
	release, err := s.Try(lockOf(h.Image))
	if err != nil {
		return nil, err
	}
	defer release()
	// The job first: when it has ended, the record says how.
	if j := s.job(h.Image); j != nil {
		return j, s.fits(j.image, h)
	}
	img, err := s.Catalog.ImageNamed(h.Image)
	if err == nil {
		err = s.settle(ctx, img)
	}
	if errors.Is(err, errdefs.ErrNotFound) {
		if err := s.fault(h.Image, h.Public().String()); err != nil {
			return nil, err
		}
		return s.start(ctx, h, origin)
	}
	if err != nil {
		return nil, err
	}
	if err := s.fits(img, h); err != nil || img.State == catalog.Ready {
		return nil, err
	}
	return s.resume(ctx, img)
}

// start begins to prepare an image that is not there.
func (s *Store) start(ctx context.Context, h backing.Handle, origin catalog.Origin) (*job, error) {
	if err := h.Preparable(); err != nil {
		return nil, err
	}
	if h.Source == backing.Download {
		return s.startDownload(ctx, h, origin)
	}
	img := catalog.Image{
		ID: handle.NewImage(s.Pool), Name: h.Image, State: catalog.Creating, Origin: origin, Source: backing.Export,
		Format: h.Format, Handle: h.Public().String(),
	}
	img, err := s.cut(ctx, h.Volume, img)
	if err != nil || img.State == catalog.Ready {
		return nil, err
	}
	return s.resume(ctx, img)
}

// resume begins to export what was cut.
func (s *Store) resume(ctx context.Context, img catalog.Image) (*job, error) {
	if err := errors.Join(s.Converter.Ready(), s.fault(img.Name, img.Handle)); err != nil {
		return nil, err
	}
	return s.begin(ctx, img, s.export)
}

// cut makes the object of an export, or leaves nothing behind.
func (s *Store) cut(ctx context.Context, volume string, img catalog.Image) (catalog.Image, error) {
	if err := s.intend(ctx, img); err != nil {
		return img, err
	}
	made := img
	made.State = catalog.Exporting
	if img.Format == backing.Raw {
		made.State = catalog.Ready
	}
	made, err := s.Cut(ctx, volume, made)
	if err == nil {
		crashpoint.At(ctx, "image cut")
		err = s.checkCut(made)
	}
	if err == nil {
		err = s.Seal(ctx, object(made))
		crashpoint.At(ctx, "cut sealed")
	}
	if err == nil {
		err = s.Catalog.PutImage(made)
	}
	if err != nil {
		return img, errors.Join(err, s.undo(ctx, img))
	}
	crashpoint.At(ctx, "cut recorded")
	return made, nil
}

// checkCut refuses a raw export that whoever guesses would take for something else: what is in it was written by a guest.
func (s *Store) checkCut(img catalog.Image) error {
	if img.Format != backing.Raw {
		return nil
	}
	return look(s.Engine.Path(object(img)), func(file *os.File, size int64) error {
		format, err := qcow2.Container(file, size)
		if err == nil && format != "" {
			err = fmt.Errorf("volume %s is not exported: it looks like %s, and a program that guesses what the raw export is would be deceived; export it with export-type=qcow2, or take an ordinary snapshot: %w", img.Volume, format, errdefs.ErrFailedPrecondition)
		}
		return err
	})
}

// fits is ErrInvalidArgument if a handle is not one of an image of its name, and ErrNotFound if it stands for one that had the
// name before.
func (s *Store) fits(img catalog.Image, h backing.Handle) error {
	other := func(key, has string) error {
		return fmt.Errorf("image %q is another one than the handle says: its %s is %q: %w", img.Name, key, has, errdefs.ErrInvalidArgument)
	}
	switch {
	case h.ID != "" && h.ID != img.ID.String():
		return fmt.Errorf("image %q (%s) does not exist any more; there is another one of its name: %w", h.Image, h.ID, errdefs.ErrNotFound)
	case h.Source != img.Source:
		return other("backingImageDataSourceType", string(img.Source))
	case h.URL != "" && backing.PublicURL(h.URL) != img.URL:
		return other("url", img.URL)
	case h.Volume != "" && img.Volume != (handle.Volume{}) && h.Volume != img.Volume.String() && h.Volume != img.VolumeName:
		return other("volume-name", img.Volume.String())
	case h.Format != "" && h.Format != img.Format:
		return other("export-type", string(img.Format))
	case h.Checksum != "" && img.State == catalog.Ready && h.Checksum != img.Checksum:
		return other("backingImageChecksum", img.Checksum)
	}
	return nil
}

// Export is what CreateSnapshot wants.
type Export struct {
	// Name is that of the snapshot and of the image.
	Name       string
	Volume     handle.Volume
	Format     backing.Format
	Parameters map[string]string
}

// Snapshot cuts a volume and begins to export it. Asked again it returns the image, as far as it is. Errors:
// ErrAlreadyExists if the name is another image's; those of cutting and exporting.
func (s *Store) Snapshot(ctx context.Context, want Export) (catalog.Image, error) {
	release, err := s.Try(lockOf(want.Name))
	if err != nil {
		return catalog.Image{}, err
	}
	defer release()
	if j := s.job(want.Name); j != nil {
		return j.image, want.matches(j.image)
	}
	img, err := s.Catalog.ImageNamed(want.Name)
	if err == nil {
		err = s.settle(ctx, img)
	}
	if errors.Is(err, errdefs.ErrNotFound) {
		img, err = s.snapshot(ctx, want)
	} else if err == nil {
		err = want.matches(img)
	}
	if err != nil || img.State == catalog.Ready {
		return img, err
	}
	_, err = s.resume(ctx, img)
	return img, err
}

// snapshot cuts a new image.
func (s *Store) snapshot(ctx context.Context, want Export) (catalog.Image, error) {
	if want.Format == backing.QCOW2 {
		if err := s.Converter.Ready(); err != nil {
			return catalog.Image{}, err
		}
	}
	s.forget(want.Name)
	img := catalog.Image{
		ID: handle.NewImage(s.Pool), Name: want.Name, State: catalog.Creating, Origin: catalog.BySnapshot,
		Source: backing.Export, Volume: want.Volume, Format: want.Format, Parameters: want.Parameters,
	}
	img.Handle = Handle(img).String()
	return s.cut(ctx, want.Volume.String(), img)
}

func (e Export) matches(img catalog.Image) error {
	other := func(format string, args ...any) error {
		return fmt.Errorf("there is an image with the name %q, and it %s: %w", img.Name, fmt.Sprintf(format, args...), errdefs.ErrAlreadyExists)
	}
	switch {
	case img.Origin != catalog.BySnapshot:
		return other("is no snapshot")
	case img.Volume != e.Volume:
		return other("is of volume %s", img.Volume)
	case img.Format != e.Format:
		return other("is exported as %s", img.Format)
	case !maps.Equal(img.Parameters, e.Parameters):
		return other("was made with the parameters %v", img.Parameters)
	}
	return nil
}

// Handle is that of an image which CreateSnapshot has made.
func Handle(img catalog.Image) backing.Handle {
	return backing.Handle{Image: img.Name, Source: backing.Export, Volume: img.Volume.String(), Format: img.Format, ID: img.ID.String()}
}

// Object is the name of an image's data.
func Object(img catalog.Image) engine.Name { return object(img) }
