package catalog

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/diskfull"
)

// buckets of the file.
var (
	metaBucket   = []byte("meta")    // formatKey, poolKey
	volumeBucket = []byte("volumes") // handle -> Volume
	nameBucket   = []byte("names")   // name -> handle
	nodeBucket   = []byte("node")    // handle -> nodeRecord
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
func (c *Catalog) Volume(id handle.Volume) (v Volume, err error) {
	err = c.db.View(func(tx *bbolt.Tx) error {
		v, err = readVolume(tx, []byte(id.String()))
		return err
	})
	return v, err
}

// VolumeNamed returns the volume of a name, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) VolumeNamed(name string) (v Volume, err error) {
	err = c.db.View(func(tx *bbolt.Tx) error {
		id := tx.Bucket(nameBucket).Get([]byte(name))
		if id == nil {
			return fmt.Errorf("volume named %q: %w", name, errdefs.ErrNotFound)
		}
		v, err = readVolume(tx, id)
		return err
	})
	return v, err
}

// Volumes returns all volumes, ordered by handle.
func (c *Catalog) Volumes() (all []Volume, err error) {
	err = c.db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(volumeBucket).ForEach(func(key, raw []byte) error {
			var v Volume
			if err := decode(key, raw, &v); err != nil {
				return err
			}
			all = append(all, v)
			return nil
		})
	})
	return all, err
}

// PutVolume writes a volume. A name that another volume has is ErrAlreadyExists.
func (c *Catalog) PutVolume(v Volume) error {
	return c.update(func(tx *bbolt.Tx) error {
		key := []byte(v.ID.String())
		names := tx.Bucket(nameBucket)
		if taken := names.Get([]byte(v.Name)); taken != nil && string(taken) != string(key) {
			return fmt.Errorf("the name %q is that of volume %s: %w", v.Name, taken, errdefs.ErrAlreadyExists)
		}
		if err := names.Put([]byte(v.Name), key); err != nil {
			return err
		}
		return put(tx.Bucket(volumeBucket), key, v)
	})
}

// RemoveVolume removes a volume, its name, and what the node did with it. It is success if there is no such volume.
func (c *Catalog) RemoveVolume(id handle.Volume) error {
	return c.update(func(tx *bbolt.Tx) error {
		key := []byte(id.String())
		v, err := readVolume(tx, key)
		if errors.Is(err, errdefs.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return errors.Join(
			tx.Bucket(nameBucket).Delete([]byte(v.Name)),
			tx.Bucket(volumeBucket).Delete(key),
			tx.Bucket(nodeBucket).Delete(key),
		)
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
		if tx.Bucket(volumeBucket).Get(key) == nil {
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

func readVolume(tx *bbolt.Tx, key []byte) (v Volume, err error) {
	raw := tx.Bucket(volumeBucket).Get(key)
	if raw == nil {
		return v, fmt.Errorf("volume %s: %w", key, errdefs.ErrNotFound)
	}
	err = decode(key, raw, &v)
	return v, err
}
