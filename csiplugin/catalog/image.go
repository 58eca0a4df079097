package catalog

import (
	"time"

	"go.etcd.io/bbolt"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/handle"
)

// Exporting is a state of images only: its data was cut and is kept, its export is not finished.
const Exporting State = "exporting"

// Origin is who has had an image made, and so whose it is to have it removed.
type Origin string

// The origins.
const (
	// BySnapshot: by CreateSnapshot; it goes with DeleteSnapshot.
	BySnapshot Origin = "snapshot"
	// OnDemand: by CreateVolume from a handle; it goes with DeleteSnapshot of the same handle.
	OnDemand Origin = "on-demand"
	// ByOperator: by the operator's command; it goes with that.
	ByOperator Origin = "operator"
)

// Image is one backing image. Its data is an object of the engine, raw.
type Image struct {
	ID handle.Image `json:"id"`
	// Name is that of its handles.
	Name   string         `json:"name"`
	State  State          `json:"state"`
	Origin Origin         `json:"origin"`
	Source backing.Source `json:"source"`
	// URL is where it was downloaded from, without the query (backing.PublicURL).
	URL string `json:"url,omitempty"`
	// Volume is what it was exported from, which may be gone, and VolumeName that one's name.
	Volume     handle.Volume `json:"volume,omitzero"`
	VolumeName string        `json:"volumeName,omitempty"`
	// Format is that of the download or of the export, as it was declared.
	Format backing.Format `json:"format"`
	// Checksum is the SHA-512 of the file that was downloaded, or of the export; empty if there is none: a raw export has no
	// file of its own.
	Checksum string `json:"checksum,omitempty"`
	// Handle is the public handle that it was made for.
	Handle string `json:"handle"`
	// Size in bytes of the object, and of the file that was downloaded or exported.
	Size     int64 `json:"size,omitempty"`
	FileSize int64 `json:"fileSize,omitempty"`
	// FSType and Block are the volume's.
	FSType string `json:"fsType,omitempty"`
	Block  bool   `json:"block,omitempty"`
	// Parameters are those of CreateSnapshot that are this driver's own.
	Parameters map[string]string `json:"parameters,omitempty"`
	// Consistency is what an export is worth: "crash" or "filesystem".
	Consistency string `json:"consistency,omitempty"`
	// Created is when it was cut, or when the download was asked for.
	Created time.Time `json:"created"`
}

func (i Image) key() string  { return i.ID.String() }
func (i Image) name() string { return i.Name }

// Image returns the image of a handle, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) Image(id handle.Image) (Image, error) { return images.one(c, id.String()) }

// ImageNamed returns the image of a name, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) ImageNamed(name string) (Image, error) { return images.byName(c, name) }

// ImagesAfter is to images what [Catalog.VolumesAfter] is to volumes.
func (c *Catalog) ImagesAfter(last string, keep func(Image) bool, limit int) ([]Image, error) {
	return images.page(c, last, keep, limit)
}

// PutImage writes an image. A name that another image has is ErrAlreadyExists.
func (c *Catalog) PutImage(i Image) error {
	return c.update(func(tx *bbolt.Tx) error { return images.put(tx, i) })
}

// RemoveImage removes an image and its name. It is success if there is no such image.
func (c *Catalog) RemoveImage(id handle.Image) error {
	return c.update(func(tx *bbolt.Tx) error { return images.remove(tx, []byte(id.String())) })
}
