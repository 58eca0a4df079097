package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/convert"
	"crust.dev/crust/csiplugin/backing/download"
	"crust.dev/crust/csiplugin/backing/images"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/pool"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// ImagesConfig is how backing images are prepared. The zero value of a field is its default.
type ImagesConfig struct {
	// AllowCIDRs and AllowHosts are where images may be downloaded from although it is not public; see package download.
	AllowCIDRs []netip.Prefix
	AllowHosts []string
	// MaxSize is how large an image may be, as a file and as a disk, in bytes.
	MaxSize int64
	// DownloadTime and ConvertTime are how long one download, or one conversion, may take.
	DownloadTime, ConvertTime time.Duration
	// ConvertUID is the user id of the child that converts.
	ConvertUID int
}

// newImages puts the store of images together.
func newImages(s *store, p *pool.Pool, cfg ImagesConfig) *images.Store {
	return images.New(images.Config{
		Catalog: s.catalog, Engine: s.engine, Pool: s.pool, Dir: p.Images(), MaxSize: cfg.MaxSize,
		Downloads: download.New(download.Config{AllowCIDRs: cfg.AllowCIDRs, AllowHosts: cfg.AllowHosts, MaxBytes: cfg.MaxSize, MaxTime: cfg.DownloadTime}),
		Converter: convert.New(convert.Config{Dir: p.Images(), UID: cfg.ConvertUID, MaxTime: cfg.ConvertTime}),
		Try:       s.locks.try, Share: s.locks.share, Cut: s.cutImage, Seal: s.protect, Label: imageLabel,
		Release: func(ctx context.Context, volume handle.Volume) { s.quiet.release(ctx, []string{volume.String()}) },
	})
}

// The parameters of a VolumeSnapshotClass that choose what a snapshot is. They are Longhorn's.
const (
	ParameterSnapshotType = "type"
	ParameterExportType   = "export-type"
	// parameterExportTypeAlias is another name of ParameterExportType.
	parameterExportTypeAlias = "exportType"

	typeSnapshot = "snap"
	typeImage    = "bi"
)

// parseSnapshotType takes what says of which type a snapshot is off the parameters. The format is empty for an ordinary one.
func parseSnapshotType(parameters map[string]string) (rest map[string]string, format backing.Format, err error) {
	rest = maps.Clone(parameters)
	for _, key := range []string{ParameterSnapshotType, ParameterExportType, parameterExportTypeAlias} {
		delete(rest, key)
	}
	export, asked := parameters[ParameterExportType]
	if alias, too := parameters[parameterExportTypeAlias]; too {
		if asked {
			return nil, "", invalid("parameters %s and %s are the same; give one of them", ParameterExportType, parameterExportTypeAlias)
		}
		export, asked = alias, true
	}
	_, bases := parameters[ParameterKeepBases]
	switch kind, given := parameters[ParameterSnapshotType]; {
	case kind == typeImage && bases:
		return nil, "", invalid("parameter %s does not go with %s=%s: images are not compared with each other", ParameterKeepBases, ParameterSnapshotType, typeImage)
	case kind == typeImage && !asked:
		return rest, backing.Raw, nil
	case kind == typeImage:
		if format, err = backing.ParseFormat(export); err != nil {
			err = fmt.Errorf("parameter %s is %w", ParameterExportType, err)
		}
		return rest, format, err
	case given && kind != typeSnapshot:
		return nil, "", invalid("parameter %s is %.64q; want %s or %s", ParameterSnapshotType, kind, typeSnapshot, typeImage)
	case asked:
		return nil, "", invalid("parameter %s goes with %s=%s only", ParameterExportType, ParameterSnapshotType, typeImage)
	}
	return rest, "", nil
}

// parseImage reads the id of a snapshot that a volume is to be made from, if it is the handle of an image.
func parseImage(id string) (*backing.Handle, error) {
	if !backing.IsHandle(id) {
		return nil, backing.ForeignScheme(id)
	}
	h, err := backing.ParseHandle(id)
	return &h, err
}

// from finds what a volume is to be made from and holds it.
func (s *store) from(ctx context.Context, want createRequest) (origin, error) {
	if want.image == nil {
		return s.origin(ctx, want.source)
	}
	img, release, err := s.images.Hold(ctx, *want.image)
	if err != nil {
		return origin{}, err
	}
	nothing := func(context.Context) error { return nil }
	return origin{object: images.Object(img), size: img.Size, fsType: img.FSType, release: release, settle: nothing}, nil
}

// sourceText is what a record says of what a volume is made from: nothing if it is made empty, and of a handle of an image no
// more than may be shown.
func (r createRequest) sourceText() string {
	if r.image != nil {
		return r.image.Public().String()
	}
	return sourceText(r.source)
}

// createImageSnapshot is CreateSnapshot for backing images.
func (c *controller) createImageSnapshot(ctx context.Context, want snapshotRequest) (catalog.Image, error) {
	return run(ctx, c.jobs, func(ctx context.Context) (catalog.Image, error) {
		release, err := c.locks.try("snapshot name " + want.name)
		if err != nil {
			return catalog.Image{}, err
		}
		defer release()
		if snap, err := c.catalog.SnapshotNamed(want.name); err == nil {
			return catalog.Image{}, alreadyExists("snapshot %s has the name %q and is no backing image", snap.ID, want.name)
		} else if !errors.Is(err, errdefs.ErrNotFound) {
			return catalog.Image{}, err
		}
		if err := c.reachable(want.topology); err != nil {
			return catalog.Image{}, fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
		}
		return c.images.Snapshot(ctx, images.Export{Name: want.name, Volume: want.volume, Format: want.format, Parameters: want.parameters})
	})
}

// noImageNamed is ErrAlreadyExists if a snapshot of the name is a backing image.
func (c *controller) noImageNamed(name string) error {
	img, err := c.catalog.ImageNamed(name)
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		return nil
	case err != nil:
		return err
	case img.Origin == catalog.BySnapshot:
		return alreadyExists("the snapshot with the name %q is a backing image (%s=%s)", name, ParameterSnapshotType, typeImage)
	}
	return nil
}

// cutImage is images.Config.Cut.
func (s *store) cutImage(ctx context.Context, volume string, img catalog.Image) (catalog.Image, error) {
	id, err := s.volumeCalled(volume)
	if err != nil {
		return img, err
	}
	v, release, err := s.hold(ctx, id)
	if err != nil {
		return img, err
	}
	defer release()
	if err := s.cuttable(ctx, v); err != nil {
		return img, err
	}
	img.Volume, img.VolumeName, img.Size, img.FSType, img.Block = v.ID, v.Name, v.Size, v.FSType, v.Block
	thaw, consistency, err := s.quieten(ctx, v, img.Parameters[ParameterConsistency])
	if err != nil {
		return img, err
	}
	crashpoint.At(ctx, "volume of the image is quiet")
	img.Created, img.Consistency = time.Now().UTC(), consistency
	note, err := imageLabel(img)
	if err == nil {
		err = s.engine.Clone(ctx, object(v.ID), images.Object(img), v.Size, note)
	}
	return img, errors.Join(err, thaw(ctx))
}

// volumeCalled finds a volume by its id or its name.
func (s *store) volumeCalled(text string) (handle.Volume, error) {
	id, err := handle.ParseVolume(text)
	if err == nil {
		return id, nil
	}
	v, err := s.catalog.VolumeNamed(text)
	if err != nil {
		return id, fmt.Errorf("the volume to export: %w", err)
	}
	return v.ID, nil
}

// quieten brings a volume that is held to rest for an export, and says what the export will be worth. Unless something else
// was asked for, a filesystem in a sandbox is frozen if that can be done, and what is exported is crash-consistent otherwise.
func (s *store) quieten(ctx context.Context, v catalog.Volume, asked string) (thaw func(context.Context) error, consistency string, err error) {
	nothing := func(context.Context) error { return nil }
	if asked == consistencyCrash {
		return nothing, consistencyCrash, nil
	}
	sandboxed, restless, err := s.writers(ctx, []catalog.Volume{v})
	switch {
	case err != nil:
		return nil, "", err
	case len(restless) > 0 && asked == consistencyFilesystem:
		return nil, "", precondition("a filesystem-consistent image cannot be had: %s; or ask for %s=%s", restless[0], ParameterConsistency, consistencyCrash)
	case len(restless) > 0:
		return nothing, consistencyCrash, nil
	}
	thaw, err = s.quiet.freeze(ctx, sandboxed)
	unable := errors.Is(err, errdefs.ErrFailedPrecondition) || errors.Is(err, errdefs.ErrNotImplemented)
	if unable && asked == "" {
		return nothing, consistencyCrash, nil
	}
	return thaw, consistencyFilesystem, err
}

// validate does no I/O. Errors are ErrInvalidArgument.
func (c ImagesConfig) validate() error {
	switch {
	case c.MaxSize < 0:
		return invalid("largest size of images %d: want a positive number of bytes", c.MaxSize)
	case c.DownloadTime < 0 || c.ConvertTime < 0:
		return invalid("time limits of images %v, %v: want none that is negative", c.DownloadTime, c.ConvertTime)
	case c.ConvertUID < 0:
		return invalid("user id %d of the child that converts images: want that of a user without rights", c.ConvertUID)
	case slices.Contains(c.AllowHosts, ""):
		return invalid("a host that images may come from has no name")
	}
	return nil
}
