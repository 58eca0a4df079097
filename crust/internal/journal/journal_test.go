package journal_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"go.etcd.io/bbolt"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/process"
	"crust.dev/crust/runtimehandler"
)

func open(t testing.TB, path string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func record(target, volume string) journal.Record {
	return journal.Record{
		State:    journal.Published,
		Deferral: runtimehandler.Deferral{Driver: "csi.example.com", VolumeID: volume, TargetPath: target},
	}
}

func TestPut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	j := open(t, path)
	rec := record("/pods/1/vol", "v1")
	group := uint32(7)
	rec.Deferral.Group = &group
	rec.Created = time.Unix(1, 0).UTC()
	rec.Binding = &journal.Binding{
		Sandbox:   runtimehandler.Sandbox{ID: "s", Runtime: "qemu", Address: "/run/s.sock"},
		Processes: []process.Identity{{PID: 1, Start: 2, Boot: "b"}},
		Since:     time.Unix(2, 0).UTC(),
	}
	if err := j.Put(nil, rec); err != nil {
		t.Fatal(err)
	}

	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, path)
	t.Run("survives a new start", func(t *testing.T) {
		got, ok := j.Get("/pods/1/vol")
		if diff := cmp.Diff(rec, got); !ok || diff != "" {
			t.Errorf("after reopening (found %v): -want +got\n%s", ok, diff)
		}
	})
	t.Run("a guard sees the others and prevents the change", func(t *testing.T) {
		refused := errors.New("refused")
		var seen []string
		err := j.Put(func(existing journal.Record) error {
			seen = append(seen, existing.Deferral.TargetPath)
			return refused
		}, record("/pods/2/vol", "v1"))
		if !errors.Is(err, refused) {
			t.Errorf("put: %v", err)
		}
		if diff := cmp.Diff([]string{"/pods/1/vol"}, seen); diff != "" {
			t.Error(diff)
		}
		if _, ok := j.Get("/pods/2/vol"); ok {
			t.Error("the refused record is there")
		}
	})
	t.Run("what a caller changes later does not change the journal", func(t *testing.T) {
		got, _ := j.Get("/pods/1/vol")
		*got.Deferral.Group = 8
		got.Binding.Sandbox.ID = "other"
		again, _ := j.Get("/pods/1/vol")
		if diff := cmp.Diff(rec, again); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("of two racing writers one wins", func(t *testing.T) {
		var won int
		var mu sync.Mutex
		var writers sync.WaitGroup
		for i := range 16 {
			writers.Go(func() {
				err := j.Put(func(existing journal.Record) error {
					if existing.Deferral.VolumeID == "raced" {
						return errdefs.ErrFailedPrecondition
					}
					return nil
				}, record(fmt.Sprintf("/pods/race/%d", i), "raced"))
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					won++
				}
			})
		}
		writers.Wait()
		if won != 1 {
			t.Errorf("%d writers passed the guard, want 1", won)
		}
	})
}

// TestModel holds the journal against a map under random operations, each followed by a look and some by reopening.
func TestModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	path := filepath.Join(t.TempDir(), "journal.db")
	j := open(t, path)
	model := map[string]journal.Record{}
	for step := range 400 {
		target := fmt.Sprintf("/t/%d", rnd.IntN(12))
		switch rnd.IntN(5) {
		case 0, 1:
			rec := record(target, fmt.Sprintf("v%d", rnd.IntN(4)))
			rec.Mounted = rnd.IntN(2) == 0
			if err := j.Put(nil, rec); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			model[target] = rec
		case 2:
			a, b := record(target, "pair"), record(target+"/b", "pair")
			if err := j.Put(nil, a, b); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			model[target], model[target+"/b"] = a, b
		case 3:
			if err := j.Delete(target); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			delete(model, target)
		case 4:
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			j = open(t, path)
		}
		got := map[string]journal.Record{}
		for _, rec := range j.List(nil) {
			got[rec.Deferral.TargetPath] = rec
		}
		if diff := cmp.Diff(model, got); diff != "" {
			t.Fatalf("step %d: -want +got\n%s", step, diff)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	write := func(t *testing.T, path string, change func(tx *bbolt.Tx) error) {
		t.Helper()
		open(t, path).Close()
		db, err := bbolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(db.Update(change), db.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name string
		make func(t *testing.T, path string)
		want error
	}{
		{"a newer format", func(t *testing.T, path string) {
			write(t, path, func(tx *bbolt.Tx) error { return tx.Bucket([]byte("meta")).Put([]byte("version"), []byte("2")) })
		}, errdefs.ErrFailedPrecondition},
		{"a version that is no number", func(t *testing.T, path string) {
			write(t, path, func(tx *bbolt.Tx) error { return tx.Bucket([]byte("meta")).Put([]byte("version"), []byte("x")) })
		}, errdefs.ErrDataLoss},
		{"a record that is not JSON", func(t *testing.T, path string) {
			write(t, path, func(tx *bbolt.Tx) error { return tx.Bucket([]byte("records")).Put([]byte("/t"), []byte("{")) })
		}, errdefs.ErrDataLoss},
		{"a record under another key", func(t *testing.T, path string) {
			write(t, path, func(tx *bbolt.Tx) error { return tx.Bucket([]byte("records")).Put([]byte("/t"), []byte("{}")) })
		}, errdefs.ErrDataLoss},
		{"somebody else's database", func(t *testing.T, path string) {
			db, err := bbolt.Open(path, 0o600, nil)
			if err != nil {
				t.Fatal(err)
			}
			err = db.Update(func(tx *bbolt.Tx) error { _, err := tx.CreateBucket([]byte("theirs")); return err })
			if err := errors.Join(err, db.Close()); err != nil {
				t.Fatal(err)
			}
		}, errdefs.ErrDataLoss},
		{"something that is no database", func(t *testing.T, path string) {
			if err := os.WriteFile(path, make([]byte, 1<<16), 0o600); err != nil {
				t.Fatal(err)
			}
		}, errdefs.ErrDataLoss},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "journal.db")
			tc.make(t, path)
			before, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			j, err := journal.Open(path)
			if !errors.Is(err, tc.want) {
				t.Errorf("open: %v, want %v", err, tc.want)
			}
			if err == nil {
				_ = j.Close()
			}
			after, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if string(before) != string(after) {
				t.Error("the file was changed")
			}
		})
	}
	t.Run("a file that is open elsewhere", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "journal.db")
		open(t, path)
		if _, err := journal.Open(path); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("open: %v", err)
		}
	})
}

func BenchmarkPut(b *testing.B) {
	for _, parallel := range []int{1, 64} {
		b.Run(fmt.Sprintf("writers=%d", parallel), func(b *testing.B) {
			j := open(b, filepath.Join(b.TempDir(), "journal.db"))
			b.SetParallelism(max(1, parallel/2))
			var n sync.Map
			b.RunParallel(func(pb *testing.PB) {
				target := fmt.Sprintf("/t/%d", rand.Int())
				n.Store(target, true)
				for pb.Next() {
					if err := j.Put(nil, record(target, "v")); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}
