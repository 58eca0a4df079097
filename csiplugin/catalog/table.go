package catalog

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
)

// record is what a table holds. name is empty for records that nobody looks for by name.
type record interface {
	key() string
	name() string
}

// table is two buckets: records by their handles, and handles by names.
type table[R record] struct {
	// word is what messages call a record.
	word           string
	records, names []byte
}

var (
	volumes   = table[Volume]{"volume", []byte("volumes"), []byte("names")}
	snapshots = table[Snapshot]{"snapshot", []byte("snapshots"), []byte("snapshot-names")}
	groups    = table[Group]{"group snapshot", []byte("groups"), []byte("group-names")}
	images    = table[Image]{"image", []byte("images"), []byte("image-names")}
	bases     = table[Base]{"base", []byte("bases"), []byte("base-names")}
)

func (t table[R]) create(tx *bbolt.Tx) error {
	for _, name := range [][]byte{t.records, t.names} {
		if _, err := tx.CreateBucket(name); err != nil {
			return err
		}
	}
	return nil
}

// get is ErrNotFound if there is no such record.
func (t table[R]) get(tx *bbolt.Tx, key []byte) (r R, err error) {
	raw := tx.Bucket(t.records).Get(key)
	if raw == nil {
		return r, fmt.Errorf("%s %s: %w", t.word, key, errdefs.ErrNotFound)
	}
	err = decode(key, raw, &r)
	return r, err
}

// named is ErrNotFound if no record has the name.
func (t table[R]) named(tx *bbolt.Tx, name string) (r R, err error) {
	key := tx.Bucket(t.names).Get([]byte(name))
	if key == nil {
		return r, fmt.Errorf("%s named %q: %w", t.word, name, errdefs.ErrNotFound)
	}
	return t.get(tx, key)
}

// after calls f with the records whose handles come after one, or with all if that is empty, in their order, until f
// returns false.
func (t table[R]) after(tx *bbolt.Tx, last string, f func(R) bool) error {
	cursor := tx.Bucket(t.records).Cursor()
	key, raw := cursor.Seek([]byte(last))
	if last != "" && string(key) == last {
		key, raw = cursor.Next()
	}
	for ; key != nil; key, raw = cursor.Next() {
		var r R
		if err := decode(key, raw, &r); err != nil {
			return err
		}
		if !f(r) {
			return nil
		}
	}
	return nil
}

// put writes a record. A name that another record has is ErrAlreadyExists.
func (t table[R]) put(tx *bbolt.Tx, r R) error {
	key := []byte(r.key())
	if name := r.name(); name != "" {
		names := tx.Bucket(t.names)
		if taken := names.Get([]byte(name)); taken != nil && string(taken) != string(key) {
			return fmt.Errorf("the name %q is that of %s %s: %w", name, t.word, taken, errdefs.ErrAlreadyExists)
		}
		if err := names.Put([]byte(name), key); err != nil {
			return err
		}
	}
	return put(tx.Bucket(t.records), key, r)
}

// remove removes a record and its name. It is success if there is no such record.
func (t table[R]) remove(tx *bbolt.Tx, key []byte) error {
	r, err := t.get(tx, key)
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if name := r.name(); name != "" {
		err = tx.Bucket(t.names).Delete([]byte(name))
	}
	return errors.Join(err, tx.Bucket(t.records).Delete(key))
}

// check decodes every record and holds the names against them.
func (t table[R]) check(tx *bbolt.Tx) error {
	records, names := tx.Bucket(t.records), tx.Bucket(t.names)
	if records == nil || names == nil {
		return fmt.Errorf("a bucket of %ss is missing: %w", t.word, errdefs.ErrDataLoss)
	}
	return records.ForEach(func(key, raw []byte) error {
		var r R
		if err := decode(key, raw, &r); err != nil {
			return err
		}
		if r.key() != string(key) || r.name() != "" && string(names.Get([]byte(r.name()))) != string(key) {
			return fmt.Errorf("record %.64q does not belong to its key or name: %w", key, errdefs.ErrDataLoss)
		}
		return nil
	})
}

// The following are a table's operations, each as a transaction of its own.

func view[T any](c *Catalog, f func(tx *bbolt.Tx) (T, error)) (result T, err error) {
	err = c.db.View(func(tx *bbolt.Tx) error {
		result, err = f(tx)
		return err
	})
	return result, err
}

func (t table[R]) one(c *Catalog, key string) (R, error) {
	return view(c, func(tx *bbolt.Tx) (R, error) { return t.get(tx, []byte(key)) })
}

func (t table[R]) byName(c *Catalog, name string) (R, error) {
	return view(c, func(tx *bbolt.Tx) (R, error) { return t.named(tx, name) })
}

func (t table[R]) page(c *Catalog, last string, keep func(R) bool, limit int) ([]R, error) {
	return view(c, func(tx *bbolt.Tx) (found []R, err error) {
		err = t.after(tx, last, func(r R) bool {
			if keep == nil || keep(r) {
				found = append(found, r)
			}
			return limit <= 0 || len(found) < limit
		})
		return found, err
	})
}
