package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// Rebuild has fill put into the pool's catalog what the objects in a directory say. A catalog that is missing or damaged
// is made anew and takes its place when fill has succeeded; the damaged one is kept under the name that comes back. One
// that is good is given to fill as it is. Errors are those of [Open], but ErrNotFound if the directory holds no pool.
//
// A process that dies meanwhile leaves a pool that can be rebuilt again.
func Rebuild(ctx context.Context, cfg Config, fill func(objects string, pool handle.Pool, c *catalog.Catalog) error) (aside string, err error) {
	p := &Pool{cfg: cfg, root: cfg.Dir}
	defer func() { err = errors.Join(err, p.Close(context.WithoutCancel(ctx))) }()
	aside, err = p.rebuild(ctx, fill)
	if err != nil {
		return "", fmt.Errorf("rebuild pool %s: %w", cfg.Dir, err)
	}
	return aside, nil
}

func (p *Pool) rebuild(ctx context.Context, fill func(string, handle.Pool, *catalog.Catalog) error) (aside string, err error) {
	if p.lock, err = takeLock(filepath.Join(p.cfg.Dir, "lock")); err != nil {
		return "", err
	}
	if _, err := os.Lstat(p.imagePath()); err == nil {
		if err := p.mountImage(ctx); err != nil {
			return "", err
		}
	}
	if p.id, err = p.identify(); err != nil {
		return "", err
	}
	if p.catalog, err = catalog.Open(p.catalogPath()); err == nil {
		if p.catalog.Pool() != p.id {
			return "", fmt.Errorf("%s is of pool %s, and the pool is %s; move it away: %w", p.catalogPath(), p.catalog.Pool(), p.id, errdefs.ErrFailedPrecondition)
		}
		return "", fill(p.Objects(), p.id, p.catalog)
	}
	if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, errdefs.ErrDataLoss) {
		return "", err // in use, or of a newer version: that is no damage
	}
	if err := p.makeAnew(fill); err != nil {
		return "", err
	}
	crashpoint.At(ctx, "new catalog filled")
	if aside, err = p.replaceCatalog(ctx); err != nil {
		return "", err
	}
	if _, err := readIdentity(p.root); errors.Is(err, os.ErrNotExist) {
		return aside, writeIdentity(ctx, p.root, p.id)
	}
	return aside, nil
}

func (p *Pool) newCatalogPath() string { return p.catalogPath() + ".rebuilt" }

func (p *Pool) makeAnew(fill func(string, handle.Pool, *catalog.Catalog) error) error {
	if err := os.Remove(p.newCatalogPath()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := catalog.Create(p.newCatalogPath(), p.id); err != nil {
		return err
	}
	c, err := catalog.Open(p.newCatalogPath())
	if err != nil {
		return err
	}
	return errors.Join(fill(p.Objects(), p.id, c), c.Close())
}

// replaceCatalog moves the damaged catalog aside and the new one to its place.
func (p *Pool) replaceCatalog(ctx context.Context) (aside string, err error) {
	if _, err := os.Lstat(p.catalogPath()); err == nil {
		aside = p.catalogPath() + ".damaged-" + time.Now().UTC().Format("20060102T150405.000000000")
		if err := os.Rename(p.catalogPath(), aside); err != nil {
			return "", err
		}
		crashpoint.At(ctx, "damaged catalog moved aside")
	}
	if err := os.Rename(p.newCatalogPath(), p.catalogPath()); err != nil {
		return "", err
	}
	crashpoint.At(ctx, "new catalog in its place")
	return aside, syncDir(p.root)
}

// identify returns the pool's identity, by its objects' names if nothing else says it.
func (p *Pool) identify() (handle.Pool, error) {
	id, err := readIdentity(p.root)
	if err == nil || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, errdefs.ErrDataLoss) {
		return id, err
	}
	damaged := err
	entries, err := os.ReadDir(p.Objects())
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("there is no %s, so there is no pool: %w", p.Objects(), errdefs.ErrNotFound)
	}
	if err != nil {
		return "", err
	}
	found := map[handle.Pool]bool{}
	for _, entry := range entries {
		if h, err := handle.Parse(entry.Name()); err == nil {
			found[h.Pool()] = true
			id = h.Pool()
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("whose pool this is cannot be told from the names of its %d objects, which are of %d pools (%v): %w", len(entries), len(found), damaged, errdefs.ErrDataLoss)
	}
	if errors.Is(damaged, errdefs.ErrDataLoss) {
		if err := os.Remove(filepath.Join(p.root, "pool.json")); err != nil {
			return "", err
		}
	}
	return id, nil
}
