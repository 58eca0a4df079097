package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/diskfull"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// MinImageSize is the smallest image in bytes: mkfs.xfs makes no smaller filesystem.
const MinImageSize = 300 << 20

// Config says what is opened.
type Config struct {
	// Dir is the absolute path of the pool's directory. It is made if its parent exists.
	Dir string
	// ImageSize in bytes is what an image is made with, if one has to be made. 0 is half of the free space, and at least
	// 1 GiB. An image that is there keeps its size.
	ImageSize int64
	Log       *slog.Logger
}

// Pool is an open pool.
type Pool struct {
	cfg     Config
	root    string
	id      handle.Pool
	lock    *os.File
	catalog *catalog.Catalog
	mounted bool
}

// Open opens a pool, and makes it if the directory holds none. Errors: ErrUnavailable if another process has it open,
// ErrFailedPrecondition if another version wrote it or the directory cannot hold a pool, ErrDataLoss if it is damaged,
// ErrResourceExhausted on a full disk. A pool that cannot be opened is left as it is.
func Open(ctx context.Context, cfg Config) (*Pool, error) {
	p := &Pool{cfg: cfg, root: cfg.Dir}
	if err := p.open(ctx); err != nil {
		return nil, fmt.Errorf("open pool %s: %w", cfg.Dir, errors.Join(diskfull.Kind(err), p.Close(context.WithoutCancel(ctx))))
	}
	return p, nil
}

func (p *Pool) open(ctx context.Context) error {
	if err := os.Mkdir(p.cfg.Dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	var err error
	if p.lock, err = takeLock(filepath.Join(p.cfg.Dir, "lock")); err != nil {
		return err
	}
	direct, err := p.direct()
	if err != nil {
		return err
	}
	if !direct {
		if err := p.mountImage(ctx); err != nil {
			return err
		}
	}
	if err := p.make(ctx); err != nil {
		return err
	}
	return p.openCatalog()
}

// ID is the pool's identity.
func (p *Pool) ID() handle.Pool { return p.id }

// Objects is the directory of the engine.
func (p *Pool) Objects() string { return filepath.Join(p.root, "objects") }

// Catalog is the pool's catalog. It is open as long as the pool is.
func (p *Pool) Catalog() *catalog.Catalog { return p.catalog }

// Close closes the pool. Its image is unmounted unless somebody still uses it.
func (p *Pool) Close(ctx context.Context) error {
	var errs []error
	if p.catalog != nil {
		errs = append(errs, p.catalog.Close())
	}
	if p.mounted {
		errs = append(errs, p.unmountImage(ctx))
	}
	if p.lock != nil {
		errs = append(errs, p.lock.Close())
	}
	return errors.Join(errs...)
}

// make makes what a pool consists of, if it is not there, in the order catalog, objects, pool.json.
func (p *Pool) make(ctx context.Context) error {
	id, err := readIdentity(p.root)
	if err == nil {
		p.id = id
		return nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := p.refuseOrphans(); err != nil {
		return err
	}
	if p.id, err = p.makeCatalog(); err != nil {
		return err
	}
	crashpoint.At(ctx, "catalog made")
	if err := os.Mkdir(p.Objects(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	crashpoint.At(ctx, "object directory made")
	return writeIdentity(ctx, p.root, p.id)
}

// makeCatalog makes the catalog of a new pool, or finds the one that an interrupted start has made.
func (p *Pool) makeCatalog() (handle.Pool, error) {
	id := handle.NewPool()
	err := catalog.Create(p.catalogPath(), id)
	if !errors.Is(err, errdefs.ErrAlreadyExists) {
		return id, err
	}
	c, err := catalog.Open(p.catalogPath())
	if err != nil {
		return "", err
	}
	return c.Pool(), c.Close()
}

// refuseOrphans refuses to make a pool around objects of one whose catalog is gone.
func (p *Pool) refuseOrphans() error {
	if _, err := os.Lstat(p.catalogPath()); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	entries, err := os.ReadDir(p.Objects())
	if errors.Is(err, os.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	return errors.Join(err, fmt.Errorf("%s holds data, and there is neither pool.json nor catalog.db to say whose; restore them, rebuild them with crust-csi repair, or use another directory: %w",
		p.Objects(), errdefs.ErrDataLoss))
}

func (p *Pool) openCatalog() error {
	if _, err := os.Lstat(p.catalogPath()); errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is gone; restore it, or rebuild it with crust-csi repair: %w", p.catalogPath(), errdefs.ErrDataLoss)
	}
	c, err := catalog.Open(p.catalogPath())
	if err != nil {
		return err
	}
	p.catalog = c
	if c.Pool() != p.id {
		return fmt.Errorf("%s is of pool %s, and the pool is %s: %w", p.catalogPath(), c.Pool(), p.id, errdefs.ErrFailedPrecondition)
	}
	return nil
}

func (p *Pool) catalogPath() string { return filepath.Join(p.root, "catalog.db") }
