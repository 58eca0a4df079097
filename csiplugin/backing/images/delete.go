package images

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// Find returns the image that a handle stands for, in whatever state it is, without preparing it. ErrNotFound if there is none;
// ErrInvalidArgument if there is another one of its name.
func (s *Store) Find(h backing.Handle) (catalog.Image, error) {
	if h.ID != "" {
		id, err := handle.ParseImage(h.ID)
		if err == nil {
			err = id.In(s.Pool)
		}
		if err != nil {
			return catalog.Image{}, err
		}
	}
	img, err := s.Catalog.ImageNamed(h.Image)
	if err != nil {
		return img, err
	}
	if img.State == catalog.Deleting {
		return img, fmt.Errorf("image %q: %w", h.Image, errdefs.ErrNotFound)
	}
	return img, s.fits(img, h)
}

// Delete removes the image that a handle stands for, if it was made for this handle; one that the handle only refers to stays.
// What was made from it stays as it is. It is success if there is none; ErrNotFound if it is in another pool
// (handle.ForeignError). One that is being prepared ends that.
func (s *Store) Delete(ctx context.Context, h backing.Handle) error {
	return s.delete(ctx, h.Image, func() (catalog.Image, error) {
		img, err := s.Find(h)
		if err == nil && (img.Origin == catalog.ByOperator || img.Handle != h.Public().String()) || errors.Is(err, errdefs.ErrInvalidArgument) {
			return img, errReferred
		}
		return img, err
	})
}

// errReferred says that an image stays.
var errReferred = errors.New("it was not made for this handle")

// Remove removes the image of a name for the operator. ErrNotFound if there is none; ErrFailedPrecondition for one that a
// snapshot stands for.
func (s *Store) Remove(ctx context.Context, name string) error {
	return s.delete(ctx, name, func() (catalog.Image, error) {
		img, err := s.Catalog.ImageNamed(name)
		if err == nil && img.Origin == catalog.BySnapshot {
			err = fmt.Errorf("image %q is a snapshot; delete that (its handle is %s): %w", name, img.Handle, errdefs.ErrFailedPrecondition)
		}
		if errors.Is(err, errdefs.ErrNotFound) && s.forget(name) {
			return img, errReferred // there is only a failure, which is forgotten now
		}
		return img, err
	})
}

func (s *Store) delete(ctx context.Context, name string, find func() (catalog.Image, error)) error {
	release, err := s.Try(lockOf(name))
	if err != nil {
		return err
	}
	defer release()
	img, err := find()
	switch {
	case errors.Is(err, errReferred):
		return nil
	case err != nil:
		return err
	}
	if err := s.stopJob(ctx, name); err != nil {
		return err
	}
	s.forget(name)
	// The job may have ended in either way.
	img, err = s.Catalog.Image(img.ID)
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if img.State != catalog.Creating {
		if err := s.Engine.Idle(ctx, object(img)); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
		img.State = catalog.Deleting
		if err := s.Catalog.PutImage(img); err != nil {
			return err
		}
		crashpoint.At(ctx, "deletion of the image intended")
	}
	return s.remove(ctx, img)
}

// remove removes an image whose record says Creating or Deleting.
func (s *Store) remove(ctx context.Context, img catalog.Image) error {
	if err := s.clean(img); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := s.Engine.Delete(ctx, object(img)); err != nil {
		return err
	}
	crashpoint.At(ctx, "data of the image deleted")
	return s.Catalog.RemoveImage(img.ID)
}
