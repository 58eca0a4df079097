package journal

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"

	"crust.dev/crust/runtimehandler"
)

// TestMigration opens a file of format 1 with a crustd that knows format 3, one whose second step fails, and one that
// knows format 1 only.
func TestMigration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	open := func(steps ...func(*bbolt.Tx) error) (Record, error) {
		migrations = steps
		defer func() { migrations = nil }()
		j, err := Open(path)
		if err != nil {
			return Record{}, err
		}
		defer j.Close()
		rec, _ := j.Get("/target")
		return rec, nil
	}
	replace := func(old, text string) func(*bbolt.Tx) error {
		return func(tx *bbolt.Tx) error {
			b := tx.Bucket(recordsBucket)
			return b.Put([]byte("/target"), []byte(strings.ReplaceAll(string(b.Get([]byte("/target"))), old, text)))
		}
	}
	j, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Put(nil, Record{State: Published, Handler: "one", Deferral: runtimehandler.Deferral{TargetPath: "/target"}}); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}

	failure := errors.New("no")
	if _, err := open(replace("one", "two"), func(*bbolt.Tx) error { return failure }); !errors.Is(err, failure) || !strings.Contains(err.Error(), "from format 2 to 3") {
		t.Errorf("error %v", err)
	}
	if rec, err := open(); err != nil || rec.Handler != "one" {
		t.Errorf("after a migration that failed: %+v, error %v", rec, err)
	}
	for range 2 { // the second time there is nothing to do: "two" would become "three" again
		if rec, err := open(replace("one", "two"), replace("two", "three")); err != nil || rec.Handler != "three" {
			t.Errorf("migrated: %+v, error %v", rec, err)
		}
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open(); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "format 3") {
		t.Errorf("the old crustd: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the old crustd has written to the file (error %v)", err)
	}
}
