package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// migrations lead from one version of the file's content to the next: the first from 1 to 2. One is needed when an older
// crustd would misread what a newer one has written, or lose something that matters by writing it back. All that a file
// needs are done in one transaction, so it is of the old version or of the new one.
var migrations []func(*bbolt.Tx) error

// formatVersion is the version of the file's content. A file of a newer version is refused.
func formatVersion() int { return 1 + len(migrations) }

var (
	metaBucket    = []byte("meta")
	recordsBucket = []byte("records")
	versionKey    = []byte("version")
)

// lockTimeout is how long Open waits for another process to let go of the file.
const lockTimeout = 2 * time.Second

// Journal is an open journal. Its methods may be called from several goroutines.
type Journal struct {
	db        *bbolt.DB
	committer committer

	mu      sync.RWMutex
	records map[string]Record // by target path; a change is here before it is durable, a deletion after
}

// Open opens the journal, or makes an empty one if there is no file. A file that it cannot read, in whole or in part,
// is left exactly as it is: ErrDataLoss if it is damaged, ErrFailedPrecondition if a newer crustd has written it,
// ErrUnavailable if another process has it open.
func Open(path string) (_ *Journal, err error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout, NoFreelistSync: true})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return nil, fmt.Errorf("journal %s is open in another process; is a second crustd running?: %w", path, errdefs.ErrUnavailable)
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
		return nil, damaged(path, err)
	case err != nil:
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	j := &Journal{db: db, committer: committer{db: db}}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.Close())
		}
	}()
	if err := j.initialise(path); err != nil {
		return nil, err
	}
	if j.records, err = load(db, path); err != nil {
		return nil, err
	}
	return j, nil
}

func damaged(path string, err error) error {
	return fmt.Errorf("journal %s is damaged (%w); it was left as it is: move it away to start with an empty one, after which volumes "+
		"that are published now can only be unpublished with the driver itself: %w", path, err, errdefs.ErrDataLoss)
}

// initialise checks the version, and gives an empty file its buckets. It writes to no other file.
func (j *Journal) initialise(path string) error {
	empty, version := false, 0
	err := j.db.View(func(tx *bbolt.Tx) (err error) {
		if meta := tx.Bucket(metaBucket); meta != nil {
			version, err = parseVersion(path, meta.Get(versionKey))
			return err
		}
		if name, _ := tx.Cursor().First(); name != nil {
			return damaged(path, fmt.Errorf("unexpected bucket %q", name))
		}
		empty = true
		return nil
	})
	if err != nil {
		return err
	}
	if !empty {
		return j.migrate(path, version)
	}
	return j.db.Update(func(tx *bbolt.Tx) error {
		for _, bucket := range [][]byte{metaBucket, recordsBucket} {
			if _, err := tx.CreateBucket(bucket); err != nil {
				return fmt.Errorf("journal %s: %w", path, err)
			}
		}
		return putVersion(tx)
	})
}

func putVersion(tx *bbolt.Tx) error {
	return tx.Bucket(metaBucket).Put(versionKey, fmt.Append(nil, formatVersion()))
}

// migrate brings a file of an older version up to date.
func (j *Journal) migrate(path string, version int) error {
	if version == formatVersion() {
		return nil
	}
	return j.db.Update(func(tx *bbolt.Tx) error {
		for from, migration := range migrations[version-1:] {
			if err := migration(tx); err != nil {
				return fmt.Errorf("journal %s: from format %d to %d: %w", path, version+from, version+from+1, err)
			}
		}
		return putVersion(tx)
	})
}

func parseVersion(path string, raw []byte) (int, error) {
	version, err := strconv.Atoi(string(raw))
	if err != nil || version < 1 {
		return 0, damaged(path, fmt.Errorf("version %q", raw))
	}
	if version > formatVersion() {
		return 0, fmt.Errorf("journal %s has format %d, this crustd knows up to %d; run the newer crustd, or unpublish all volumes with it "+
			"before going back: %w", path, version, formatVersion(), errdefs.ErrFailedPrecondition)
	}
	return version, nil
}

func load(db *bbolt.DB, path string) (map[string]Record, error) {
	records := map[string]Record{}
	err := db.View(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(recordsBucket)
		if bucket == nil {
			return damaged(path, fmt.Errorf("no bucket %q", recordsBucket))
		}
		return bucket.ForEach(func(key, value []byte) error {
			var rec Record
			if err := json.Unmarshal(value, &rec); err != nil {
				return damaged(path, fmt.Errorf("record %q: %w", key, err))
			}
			if rec.Deferral.TargetPath != string(key) {
				return damaged(path, fmt.Errorf("record %q is about %q", key, rec.Deferral.TargetPath))
			}
			records[string(key)] = rec
			return nil
		})
	})
	return records, err
}

// Close closes the file. Nothing is lost without it.
func (j *Journal) Close() error { return j.db.Close() }

// Get returns the record of a target path.
func (j *Journal) Get(targetPath string) (Record, bool) {
	j.mu.RLock()
	defer j.mu.RUnlock()
	rec, ok := j.records[targetPath]
	return rec.clone(), ok
}

// List returns the records for which keep is true, sorted by target path; nil keeps all.
func (j *Journal) List(keep func(Record) bool) []Record {
	j.mu.RLock()
	defer j.mu.RUnlock()
	var list []Record
	for _, target := range slices.Sorted(maps.Keys(j.records)) {
		if rec := j.records[target]; keep == nil || keep(rec) {
			list = append(list, rec.clone())
		}
	}
	return list
}

// Put makes records durable, all or none. If guard is not nil it is called for every record that exists under another
// target path, before anything is written and in one step with reserving the new records, and its error is returned.
// ErrResourceExhausted if the disk is full; then nothing has changed.
func (j *Journal) Put(guard func(existing Record) error, records ...Record) error {
	before, err := j.reserve(guard, records)
	if err != nil {
		return err
	}
	if err := j.commit(records); err != nil {
		j.restore(before, records)
		return err
	}
	return nil
}

func (j *Journal) reserve(guard func(Record) error, records []Record) (before map[string]Record, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	before = map[string]Record{}
	for _, rec := range records {
		if old, ok := j.records[rec.Deferral.TargetPath]; ok {
			before[rec.Deferral.TargetPath] = old
		}
	}
	if guard != nil {
		for target, existing := range j.records {
			if slices.ContainsFunc(records, func(r Record) bool { return r.Deferral.TargetPath == target }) {
				continue
			}
			if err := guard(existing); err != nil {
				return nil, err
			}
		}
	}
	for _, rec := range records {
		j.records[rec.Deferral.TargetPath] = rec.clone()
	}
	return before, nil
}

func (j *Journal) commit(records []Record) error {
	values := make([][]byte, len(records))
	for i, rec := range records {
		value, err := json.Marshal(rec)
		if err != nil {
			return fmt.Errorf("record %s: %w", rec.Deferral.TargetPath, err)
		}
		values[i] = value
	}
	return j.committer.do(func(bucket *bbolt.Bucket) error {
		for i, rec := range records {
			if err := bucket.Put([]byte(rec.Deferral.TargetPath), values[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

func (j *Journal) restore(before map[string]Record, records []Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, rec := range records {
		if old, ok := before[rec.Deferral.TargetPath]; ok {
			j.records[rec.Deferral.TargetPath] = old
		} else {
			delete(j.records, rec.Deferral.TargetPath)
		}
	}
}

// Delete forgets a record. It succeeds if there is none.
func (j *Journal) Delete(targetPath string) error {
	if _, ok := j.Get(targetPath); !ok {
		return nil
	}
	if err := j.committer.do(func(bucket *bbolt.Bucket) error { return bucket.Delete([]byte(targetPath)) }); err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.records, targetPath)
	return nil
}
