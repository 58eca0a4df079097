package catalog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/diskfull"
)

// format is the version of what the file holds. Older ones, which lacked tables, are brought up to date when they are opened.
// Any other is refused.
const (
	format          = 4
	withoutBases    = 3
	withoutImages   = 2
	withVolumesOnly = 1
)

var (
	formatKey = []byte("format")
	poolKey   = []byte("pool")
)

// lockTimeout is how long another process may hold the file.
const lockTimeout = time.Second

// Create makes the catalog of a new pool at path: under a temporary name, synced, renamed. A file that is there already
// is ErrAlreadyExists.
func Create(path string, pool handle.Pool) error {
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("create catalog: %s: %w", path, errors.Join(err, errdefs.ErrAlreadyExists))
	}
	if err := create(path, pool); err != nil {
		return fmt.Errorf("create catalog: %w", diskfull.Kind(err))
	}
	return nil
}

func create(path string, pool handle.Pool) error {
	unfinished := path + ".new"
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := prepareFile(unfinished); err != nil {
		return err
	}
	db, err := bbolt.Open(unfinished, 0o600, &bbolt.Options{Timeout: lockTimeout})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{metaBucket, nodeBucket} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		meta := tx.Bucket(metaBucket)
		return errors.Join(volumes.create(tx), snapshots.create(tx), groups.create(tx), images.create(tx), bases.create(tx), putFormat(meta), meta.Put(poolKey, []byte(pool)))
	})
	if err := errors.Join(err, db.Sync(), db.Close()); err != nil {
		return err
	}
	if err := os.Rename(unfinished, path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Open opens the catalog at path, which [Create] has made. Errors: ErrDataLoss if it is damaged, ErrFailedPrecondition if
// another version has written it, ErrUnavailable if another process has it open. In each case, and if it is missing, it is
// left exactly as it is.
func Open(path string) (*Catalog, error) {
	c, err := open(path)
	if err != nil {
		return nil, fmt.Errorf("open catalog %s: %w", path, err)
	}
	_ = c.Reserve() // on a full disk what was reserved before has to do
	return c, nil
}

func open(path string) (*Catalog, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	// bbolt would take an empty file for a new one.
	if !info.Mode().IsRegular() || info.Size() == 0 {
		return nil, fmt.Errorf("it is empty or no regular file: %w", errdefs.ErrDataLoss)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if err := checkPages(raw); err != nil {
		return nil, err
	}
	// The first look at what is in them is without the right to write.
	if err := guarded(func() error { return inspect(path) }); err != nil {
		return nil, err
	}
	var db *bbolt.DB
	err = guarded(func() (err error) {
		db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout})
		return err
	})
	if err != nil {
		return nil, err
	}
	c := &Catalog{db: db}
	var found uint32
	if err := c.db.View(func(tx *bbolt.Tx) error { c.pool, found, err = readMeta(tx); return err }); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	if found != format {
		if err := c.update(func(tx *bbolt.Tx) error { return upgrade(tx, found) }); err != nil {
			return nil, errors.Join(err, db.Close())
		}
	}
	return c, nil
}

// upgrade makes a catalog of the present format from an older one.
func upgrade(tx *bbolt.Tx, from uint32) error {
	if from == withVolumesOnly {
		if err := errors.Join(snapshots.create(tx), groups.create(tx)); err != nil {
			return err
		}
	}
	if from <= withoutImages {
		if err := images.create(tx); err != nil {
			return err
		}
	}
	return errors.Join(bases.create(tx), putFormat(tx.Bucket(metaBucket)))
}

func putFormat(meta *bbolt.Bucket) error {
	return meta.Put(formatKey, binary.BigEndian.AppendUint32(nil, format))
}

// inspect looks at every page and record.
func inspect(path string) error {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout, ReadOnly: true, PreLoadFreelist: true})
	if err != nil {
		return err
	}
	return errors.Join(db.View(func(tx *bbolt.Tx) error {
		_, found, err := readMeta(tx)
		if err != nil {
			return err
		}
		if err := readAll(tx, found); err != nil {
			return err
		}
		var damage []error
		for err := range tx.Check() {
			damage = append(damage, err)
		}
		if len(damage) > 0 {
			return fmt.Errorf("%w: %w", damage[0], errdefs.ErrDataLoss)
		}
		return nil
	}), db.Close())
}

func readMeta(tx *bbolt.Tx) (pool handle.Pool, found uint32, err error) {
	meta := tx.Bucket(metaBucket)
	if meta == nil {
		return "", 0, fmt.Errorf("it is no catalog: %w", errdefs.ErrDataLoss)
	}
	raw := meta.Get(formatKey)
	if len(raw) != 4 {
		return "", 0, fmt.Errorf("it has no format number: %w", errdefs.ErrDataLoss)
	}
	if found = binary.BigEndian.Uint32(raw); found < withVolumesOnly || found > format {
		return "", 0, fmt.Errorf("it has format %d, this version knows format %d; use the version that wrote it: %w", found, format, errdefs.ErrFailedPrecondition)
	}
	if pool, err = handle.ParsePool(string(meta.Get(poolKey))); err != nil {
		return "", 0, fmt.Errorf("%v: %w", err, errdefs.ErrDataLoss)
	}
	return pool, found, nil
}

// readAll decodes every record and holds the names against the records.
func readAll(tx *bbolt.Tx, found uint32) error {
	if err := volumes.check(tx); err != nil {
		return err
	}
	if found >= withoutImages {
		if err := snapshots.check(tx); err != nil {
			return err
		}
		if err := groups.check(tx); err != nil {
			return err
		}
	}
	if found >= withoutBases {
		if err := images.check(tx); err != nil {
			return err
		}
	}
	if found >= format {
		if err := bases.check(tx); err != nil {
			return err
		}
	}
	nodes := tx.Bucket(nodeBucket)
	if nodes == nil {
		return fmt.Errorf("the node bucket is missing: %w", errdefs.ErrDataLoss)
	}
	return nodes.ForEach(func(key, raw []byte) error {
		var n nodeRecord
		return decode(key, raw, &n)
	})
}

// guarded turns what bbolt does with a damaged file into ErrDataLoss: errors of its own, and panics.
func guarded(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v: %w", r, errdefs.ErrDataLoss)
		}
	}()
	err = f()
	switch {
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	case errors.Is(err, bolterrors.ErrTimeout):
		return fmt.Errorf("another process has it open: %w", errdefs.ErrUnavailable)
	}
	return err
}
