package catalog_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
)

func TestMain(m *testing.M) { os.Exit(scratch.Main(m)) }

const pool = handle.Pool("0123456789ab")

var byHandle = cmp.Options{
	cmp.Comparer(func(a, b handle.Volume) bool { return a == b }),
	cmpopts.EquateEmpty(),
}

func newCatalog(t testing.TB, dir string) (*catalog.Catalog, string) {
	t.Helper()
	path := filepath.Join(dir, "catalog.db")
	if err := catalog.Create(path, pool); err != nil {
		t.Fatal(err)
	}
	return reopen(t, path), path
}

func reopen(t testing.TB, path string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func volume(name string) catalog.Volume {
	return catalog.Volume{
		ID: handle.NewVolume(pool), Name: name, State: catalog.Ready, Size: 1 << 30, FSType: "ext4",
		Parameters: map[string]string{"crust.dev/defer": "auto"}, Created: time.Unix(1700000000, 5).UTC(),
	}
}

func TestWhatIsWrittenIsReadAfterReopening(t *testing.T) {
	c, path := newCatalog(t, t.TempDir())
	v := volume("a")
	n := catalog.Node{
		Staged: &catalog.Stage{Path: "/stage", Use: catalog.Use{FSType: "ext4", Mode: 1}, Boot: "b"},
		Publishes: map[string]catalog.Publish{"/t": {
			Target: "/t", Staging: "/stage", Kind: catalog.Deferred, State: catalog.Published, ReadOnly: true,
			Group: "5", Policy: "Always", NeverWritten: true, Boot: "b",
		}},
		Formatting: true,
	}
	if err := errors.Join(c.PutVolume(v), c.PutNode(v.ID, n), c.Close()); err != nil {
		t.Fatal(err)
	}
	c = reopen(t, path)
	if c.Pool() != pool {
		t.Errorf("the catalog is of pool %s", c.Pool())
	}
	gotV, err := c.VolumeNamed("a")
	if diff := cmp.Diff(v, gotV, byHandle); diff != "" || err != nil {
		t.Error(err, diff)
	}
	gotN, err := c.Node(v.ID)
	if diff := cmp.Diff(n, gotN, byHandle); diff != "" || err != nil {
		t.Error(err, diff)
	}
}

func TestTwoVolumesCannotHaveOneName(t *testing.T) {
	c, _ := newCatalog(t, t.TempDir())
	a, b := volume("a"), volume("a")
	if err := c.PutVolume(a); err != nil {
		t.Fatal(err)
	}
	if err := c.PutVolume(b); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("got %v", err)
	}
	if _, err := c.Volume(b.ID); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("the refused volume is there: %v", err)
	}
}

func TestANodeRecordNeedsItsVolume(t *testing.T) {
	c, _ := newCatalog(t, t.TempDir())
	v := volume("a")
	if err := c.PutNode(v.ID, catalog.Node{Formatting: true}); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if err := errors.Join(c.PutVolume(v), c.PutNode(v.ID, catalog.Node{Formatting: true}), c.RemoveVolume(v.ID), c.RemoveVolume(v.ID)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Node(v.ID); err != nil || n.Formatting {
		t.Errorf("the record has outlived its volume: %+v, %v", n, err)
	}
}

// TestRandomOperationsAgainstAMap reopens the catalog after each operation and compares it with a map that went through
// the same.
func TestRandomOperationsAgainstAMap(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	c, path := newCatalog(t, t.TempDir())
	volumes, nodes := map[string]catalog.Volume{}, map[string]catalog.Node{}
	pick := func() (v catalog.Volume) {
		names := slices.Sorted(maps.Keys(volumes))
		if len(names) == 0 {
			return volume("none")
		}
		return volumes[names[r.IntN(len(names))]]
	}
	for range 150 {
		v := pick()
		var err error
		switch r.IntN(4) {
		case 0:
			v = volume(fmt.Sprintf("v%d", r.IntN(1000)))
			if _, taken := volumes[v.Name]; taken {
				continue
			}
			volumes[v.Name], err = v, c.PutVolume(v)
		case 1:
			if _, there := volumes[v.Name]; there {
				v.Size += 4096
				v.State = []catalog.State{catalog.Ready, catalog.Deleting}[r.IntN(2)]
				volumes[v.Name], err = v, c.PutVolume(v)
			}
		case 2:
			n := catalog.Node{Formatting: r.IntN(2) == 0}
			err = c.PutNode(v.ID, n)
			if _, there := volumes[v.Name]; there {
				nodes[v.Name] = n
			} else if errors.Is(err, errdefs.ErrNotFound) {
				err = nil
			}
		case 3:
			delete(volumes, v.Name)
			delete(nodes, v.Name)
			err = c.RemoveVolume(v.ID)
		}
		if err := errors.Join(err, c.Close()); err != nil {
			t.Fatal(err)
		}
		c = reopen(t, path)
		compare(t, c, volumes, nodes)
	}
}

func compare(t *testing.T, c *catalog.Catalog, volumes map[string]catalog.Volume, nodes map[string]catalog.Node) {
	t.Helper()
	all, err := c.Volumes()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]catalog.Volume{}
	for _, v := range all {
		got[v.Name] = v
		n, err := c.Node(v.ID)
		if diff := cmp.Diff(nodes[v.Name], n, byHandle); diff != "" || err != nil {
			t.Fatal(err, diff)
		}
	}
	if diff := cmp.Diff(volumes, got, byHandle); diff != "" {
		t.Fatal(diff)
	}
}

func TestASecondProcessIsKeptOut(t *testing.T) {
	_, path := newCatalog(t, t.TempDir())
	if _, err := catalog.Open(path); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

func TestCreateOverwritesNothing(t *testing.T) {
	_, path := newCatalog(t, t.TempDir())
	if err := catalog.Create(path, pool); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("got %v", err)
	}
}
