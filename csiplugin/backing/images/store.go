package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing/convert"
	"crust.dev/crust/csiplugin/backing/download"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
)

const (
	// DefaultMaxSize is how large an image may be, in bytes.
	DefaultMaxSize = 256 << 30
	// reserve is how many bytes of the pool preparing images leaves to others.
	reserve = 256 << 20
	// parallel is how many images are prepared at the same time.
	parallel = 2
)

// Config is what a store needs. All fields but MaxSize are required.
type Config struct {
	Catalog *catalog.Catalog
	Engine  engine.Engine
	Pool    handle.Pool
	// Dir is a directory on the pool's filesystem that is the store's alone. It is made if its parent exists.
	Dir       string
	Downloads *download.Downloader
	Converter *convert.Converter
	// MaxSize is how large an image may be, as a file and as a disk, in bytes; 0 is DefaultMaxSize.
	MaxSize int64
	// Try takes the lock of a key alone, Share together with others who share it. Both are ErrAborted if they cannot.
	Try, Share func(key string) (release func(), err error)
	// Cut clones what the volume of an id or a name holds at one moment to the object of an image, with [Config.Label] of it,
	// and returns the image with Volume, VolumeName, Size, FSType, Block, Consistency and Created filled in. If it fails, the
	// object may be there.
	Cut func(ctx context.Context, volume string, img catalog.Image) (catalog.Image, error)
	// Release thaws a volume that Cut of a process that died may have left frozen, if it did.
	Release func(ctx context.Context, volume handle.Volume)
	// Seal protects the object of an image, which nobody writes to any more, from being written to until it is deleted.
	Seal func(ctx context.Context, object engine.Name) error
	// Label is what is to be kept with an image's data.
	Label func(catalog.Image) ([]byte, error)
}

// Store keeps images. Its methods may be called from any goroutine after [Store.Recover].
type Store struct {
	Config
	*metrics
	slots chan struct{}

	mu      sync.Mutex
	jobs    map[string]*job   // by the image's name
	failed  map[string]*fault // by the image's name
	stopped bool
	running sync.WaitGroup
}

// New returns a store. It does no I/O.
func New(cfg Config) *Store {
	if cfg.MaxSize == 0 {
		cfg.MaxSize = DefaultMaxSize
	}
	s := &Store{Config: cfg, slots: make(chan struct{}, parallel), jobs: map[string]*job{}, failed: map[string]*fault{}}
	s.metrics = newMetrics(s)
	return s
}

// Recover makes the store's directory and finishes or undoes what an earlier process left undone. What cannot be finished now
// is left to the next call for that image.
func (s *Store) Recover(ctx context.Context) error {
	if err := os.Mkdir(s.Dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("directory of images: %w", err)
	}
	all, err := s.Catalog.ImagesAfter("", nil, 0)
	if err != nil {
		return err
	}
	keep := map[string]bool{}
	for _, img := range all {
		err := s.settle(ctx, img)
		if err == nil {
			_, err = s.stat(ctx, img)
			keep[exportFile(img)] = img.State == catalog.Ready
		}
		if err == nil {
			err = s.Seal(ctx, object(img)) // a rebuilt pool, or an image that an older version has made
		}
		if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			rpc.Logger(ctx).WarnContext(ctx, "an image needs attention", logImage, img.Name, rpc.LogError, err)
		}
	}
	return s.sweep(keep)
}

// Stop ends all jobs and waits for that, at most as long as ctx lasts. What they were at is undone, or kept as it is.
func (s *Store) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	for _, j := range s.jobs {
		j.cancel(errStopped)
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() { defer close(done); s.running.Wait() }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("an image is still being prepared and is given up: %w", ctx.Err())
	}
}

var errStopped = fmt.Errorf("the plugin stops: %w", errdefs.ErrUnavailable)

// settle removes an image that was being made or deleted; then it is ErrNotFound.
func (s *Store) settle(ctx context.Context, img catalog.Image) error {
	if img.State == catalog.Ready || img.State == catalog.Exporting {
		return nil
	}
	if img.State == catalog.Creating && img.Volume != (handle.Volume{}) {
		s.Release(ctx, img.Volume)
	}
	if err := s.remove(ctx, img); err != nil {
		return err
	}
	return fmt.Errorf("image %q: %w", img.Name, errdefs.ErrNotFound)
}

// stat asks the engine for an image's data. That it is gone, or another than it was, is ErrDataLoss.
func (s *Store) stat(ctx context.Context, img catalog.Image) (engine.Stat, error) {
	st, err := s.Engine.Stat(ctx, object(img))
	if errors.Is(err, errdefs.ErrNotFound) {
		return st, fmt.Errorf("the data of image %q (%s) is gone: %w", img.Name, img.ID, errdefs.ErrDataLoss)
	}
	if err == nil && st.Size != img.Size {
		err = fmt.Errorf("image %q (%s) has %d bytes of data, it was made with %d: %w", img.Name, img.ID, st.Size, img.Size, errdefs.ErrDataLoss)
	}
	return st, err
}

func object(img catalog.Image) engine.Name { return engine.Name(img.ID.String()) }

// space is how many bytes images may still take.
func (s *Store) space(ctx context.Context) (int64, error) {
	c, err := s.Engine.Capacity(ctx)
	return c.Free - reserve, err
}

const logImage = "image"
