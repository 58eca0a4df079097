package catalog

import (
	"errors"
	"time"

	"go.etcd.io/bbolt"

	"crust.dev/crust/csiplugin/handle"
)

// Base is a snapshot that was deleted, and whose data is kept so that later ones can be compared with it. To everybody else
// it does not exist. It has the handle that the snapshot had.
type Base struct {
	ID handle.Snapshot `json:"id"`
	// Volume is what it was cut from, which may be gone.
	Volume handle.Volume `json:"volume"`
	// Size in bytes, that of the volume when it was cut.
	Size int64 `json:"size"`
	// Keep is how many bases of the volume are kept, this one and those younger than it.
	Keep int `json:"keep"`
	// Created is when it was cut, and Deleted when it was deleted.
	Created time.Time `json:"created"`
	Deleted time.Time `json:"deleted"`
}

func (b Base) key() string  { return b.ID.String() }
func (b Base) name() string { return "" }

// Base returns the base of a snapshot's handle. ErrNotFound if there is none.
func (c *Catalog) Base(id handle.Snapshot) (Base, error) { return bases.one(c, id.String()) }

// Bases returns all bases, ordered by handle.
func (c *Catalog) Bases() ([]Base, error) { return bases.page(c, "", nil, 0) }

// KeepBase makes a snapshot a base, in one step: its record and name go, if they are there, and that of the base comes.
func (c *Catalog) KeepBase(b Base) error {
	return c.update(func(tx *bbolt.Tx) error {
		return errors.Join(snapshots.remove(tx, []byte(b.ID.String())), bases.put(tx, b))
	})
}

// RemoveBase removes a base. It is success if there is no such base.
func (c *Catalog) RemoveBase(id handle.Snapshot) error {
	return c.update(func(tx *bbolt.Tx) error { return bases.remove(tx, []byte(id.String())) })
}
