package catalog

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/diskfull"
)

// buckets of the file, beside those of the tables.
var (
	metaBucket = []byte("meta") // formatKey, poolKey
	nodeBucket = []byte("node") // handle -> nodeRecord
)

// Catalog is an open catalog. Its methods may be called from any goroutine. A full disk is ErrResourceExhausted and
// changes nothing.
type Catalog struct {
	db   *bbolt.DB
	pool handle.Pool
}

// Pool returns the identity of the pool that the catalog belongs to.
func (c *Catalog) Pool() handle.Pool { return c.pool }

// Close closes the file. Calls that are under way end first.
func (c *Catalog) Close() error { return c.db.Close() }

// Volume returns the volume of a handle, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) Volume(id handle.Volume) (Volume, error) { return volumes.one(c, id.String()) }

// VolumeNamed returns the volume of a name, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) VolumeNamed(name string) (Volume, error) { return volumes.byName(c, name) }

// Volumes returns all volumes, ordered by handle.
func (c *Catalog) Volumes() ([]Volume, error) { return volumes.page(c, "", nil, 0) }

// VolumesAfter returns the first volumes, at most limit of them unless that is 0, whose handles come after last and that
// keep accepts. An empty last is the beginning. Handles are never used again, so pages that go on from the last handle of
// the page before show every volume that is there all the while, and none twice.
func (c *Catalog) VolumesAfter(last string, keep func(Volume) bool, limit int) ([]Volume, error) {
	return volumes.page(c, last, keep, limit)
}

// PutVolume writes a volume. A name that another volume has is ErrAlreadyExists.
func (c *Catalog) PutVolume(v Volume) error {
	return c.update(func(tx *bbolt.Tx) error { return volumes.put(tx, v) })
}

// RemoveVolume removes a volume, its name, and what the node did with it. It is success if there is no such volume.
func (c *Catalog) RemoveVolume(id handle.Volume) error {
	return c.update(func(tx *bbolt.Tx) error {
		key := []byte(id.String())
		return errors.Join(volumes.remove(tx, key), tx.Bucket(nodeBucket).Delete(key))
	})
}

// Node returns what this node does with a volume: the zero value if nothing is recorded.
func (c *Catalog) Node(id handle.Volume) (n Node, err error) {
	err = c.db.View(func(tx *bbolt.Tx) error {
		key := []byte(id.String())
		raw := tx.Bucket(nodeBucket).Get(key)
		if raw == nil {
			return nil
		}
		var rec nodeRecord
		if err := decode(key, raw, &rec); err != nil {
			return err
		}
		n = rec.Node
		return nil
	})
	return n, err
}

// PutNode writes what this node does with a volume. ErrNotFound if there is no such volume.
func (c *Catalog) PutNode(id handle.Volume, n Node) error {
	return c.update(func(tx *bbolt.Tx) error {
		key := []byte(id.String())
		if tx.Bucket(volumes.records).Get(key) == nil {
			return fmt.Errorf("volume %s: %w", id, errdefs.ErrNotFound)
		}
		if n.Staged == nil && len(n.Publishes) == 0 && !n.Formatting {
			return tx.Bucket(nodeBucket).Delete(key)
		}
		return put(tx.Bucket(nodeBucket), key, nodeRecord{ID: id, Node: n})
	})
}

func (c *Catalog) update(f func(tx *bbolt.Tx) error) error {
	if err := c.db.Update(f); err != nil {
		return fmt.Errorf("catalog: %w", diskfull.Kind(err))
	}
	return nil
}
