package catalog

import (
	"errors"
	"time"

	"go.etcd.io/bbolt"

	"crust.dev/crust/csiplugin/handle"
)

// Snapshot is one snapshot, by itself or of a group. What CreateSnapshot was asked for is here so that asking again can be
// compared.
type Snapshot struct {
	ID handle.Snapshot `json:"id"`
	// Name is empty for a snapshot of a group, which nobody asks for by name.
	Name  string `json:"name,omitempty"`
	State State  `json:"state"`
	// Volume is what it was cut from, which may be gone.
	Volume handle.Volume `json:"volume"`
	// Group is what it is a part of, or the zero handle.
	Group handle.Group `json:"group,omitzero"`
	// Size in bytes, that of the volume when it was cut.
	Size int64 `json:"size"`
	// FSType and Block are the volume's.
	FSType string `json:"fsType,omitempty"`
	Block  bool   `json:"block,omitempty"`
	// Parameters are those of CreateSnapshot that are this driver's own.
	Parameters map[string]string `json:"parameters,omitempty"`
	// Created is when it was cut.
	Created time.Time `json:"created"`
}

// Group is one group snapshot: snapshots of several volumes that were cut at one moment.
type Group struct {
	ID    handle.Group `json:"id"`
	Name  string       `json:"name"`
	State State        `json:"state"`
	// Members are its snapshots, in the order of their volumes' handles.
	Members    []handle.Snapshot `json:"members"`
	Parameters map[string]string `json:"parameters,omitempty"`
	Created    time.Time         `json:"created"`
}

func (s Snapshot) key() string  { return s.ID.String() }
func (s Snapshot) name() string { return s.Name }
func (g Group) key() string     { return g.ID.String() }
func (g Group) name() string    { return g.Name }

// Snapshot returns the snapshot of a handle, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) Snapshot(id handle.Snapshot) (Snapshot, error) {
	return snapshots.one(c, id.String())
}

// SnapshotNamed returns the snapshot of a name, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) SnapshotNamed(name string) (Snapshot, error) { return snapshots.byName(c, name) }

// SnapshotsAfter is to snapshots what [Catalog.VolumesAfter] is to volumes.
func (c *Catalog) SnapshotsAfter(last string, keep func(Snapshot) bool, limit int) ([]Snapshot, error) {
	return snapshots.page(c, last, keep, limit)
}

// PutSnapshot writes a snapshot. A name that another snapshot has is ErrAlreadyExists.
func (c *Catalog) PutSnapshot(s Snapshot) error {
	return c.update(func(tx *bbolt.Tx) error { return snapshots.put(tx, s) })
}

// RemoveSnapshot removes a snapshot and its name. It is success if there is no such snapshot.
func (c *Catalog) RemoveSnapshot(id handle.Snapshot) error {
	return c.update(func(tx *bbolt.Tx) error { return snapshots.remove(tx, []byte(id.String())) })
}

// Group returns the group snapshot of a handle, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) Group(id handle.Group) (Group, error) { return groups.one(c, id.String()) }

// GroupNamed returns the group snapshot of a name, in whatever state it is. ErrNotFound if there is none.
func (c *Catalog) GroupNamed(name string) (Group, error) { return groups.byName(c, name) }

// Groups returns all group snapshots, ordered by handle.
func (c *Catalog) Groups() ([]Group, error) { return groups.page(c, "", nil, 0) }

// PutGroup writes a group snapshot and its members, all or none. A name that another group snapshot has is
// ErrAlreadyExists.
func (c *Catalog) PutGroup(g Group, members []Snapshot) error {
	return c.update(func(tx *bbolt.Tx) error {
		err := groups.put(tx, g)
		for _, member := range members {
			err = errors.Join(err, snapshots.put(tx, member))
		}
		return err
	})
}

// RemoveGroup removes a group snapshot and its members. It is success if there is no such group snapshot.
func (c *Catalog) RemoveGroup(g Group) error {
	return c.update(func(tx *bbolt.Tx) error {
		err := groups.remove(tx, []byte(g.ID.String()))
		for _, member := range g.Members {
			err = errors.Join(err, snapshots.remove(tx, []byte(member.String())))
		}
		return err
	})
}
