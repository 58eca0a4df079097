package enginetest

import (
	"bytes"
	"encoding/binary"
	"os"
	"slices"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/internal/scratch"
)

// cloneTests are the promises of cloning, labels and extents.
func cloneTests() map[string]func(*testing.T, engine.Engine) {
	return map[string]func(*testing.T, engine.Engine){
		"a clone has the data and takes no space":          testClone,
		"a larger clone has zeros behind the data":         testCloneLarger,
		"neither end of a clone sees the other's writes":   testCloneIsItsOwn,
		"a clone outlives its source":                      testCloneOutlives,
		"a clone of what was never written is blank":       testCloneBlank,
		"a clone that cannot be made leaves nothing":       testCloneRefused,
		"a clone of what is being written is a moment":     testCloneOfALiveObject,
		"a full pool refuses a clone or holds all of it":   testCloneFull,
		"a label stays with its object":                    testLabel,
		"extents count what is shared and what is its own": testExtents,
		"names are those of the objects":                   testNames,
	}
}

func clone(t *testing.T, e engine.Engine, from, to engine.Name, size int64) {
	t.Helper()
	if err := e.Clone(t.Context(), from, to, size, []byte("clone")); err != nil {
		t.Fatal(err)
	}
}

// free is how much of the pool is free once everything is written back.
func free(t *testing.T, e engine.Engine) int64 {
	t.Helper()
	scratch.Run(t, "sync", "-f", e.Path("a"))
	c, err := e.Capacity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return c.Free
}

// pattern is data that says where it belongs.
func pattern(size int, seed uint64) []byte {
	data := make([]byte, size)
	for i := 0; i+8 <= size; i += 8 {
		binary.LittleEndian.PutUint64(data[i:], uint64(i)*0x9E3779B97F4A7C15+seed)
	}
	return data
}

func testClone(t *testing.T, e engine.Engine) {
	create(t, e, "a", 32*mib)
	data := pattern(16*mib, 1)
	writeAt(t, e, "a", data, 8*mib)
	before := free(t, e)
	for _, name := range []engine.Name{"b", "c", "d"} {
		clone(t, e, "a", name, 32*mib)
	}
	// Three copies would be 48 MiB; what three extent maps take is less than one.
	if took := before - free(t, e); took > 2*mib {
		t.Errorf("three clones of 16 MiB took %d bytes", took)
	}
	want := readAll(t, e, "a")
	for _, name := range []engine.Name{"b", "c", "d"} {
		if !bytes.Equal(readAll(t, e, name), want) {
			t.Errorf("clone %s differs from its source", name)
		}
	}
	if info, err := os.Stat(e.Path("b")); err != nil || info.Mode().Perm()&0o077 != 0 {
		t.Errorf("the clone is %v (%v), others than root must not get at it", info.Mode(), err)
	}
}

func testCloneLarger(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	writeAt(t, e, "a", []byte("end"), mib-3)
	clone(t, e, "a", "b", 8*mib)
	want := append(append(make([]byte, mib-3), "end"...), make([]byte, 7*mib)...)
	if !bytes.Equal(readAll(t, e, "b"), want) {
		t.Error("the larger clone has not the data and then zeros")
	}
	if got := stat(t, e, "b"); got.Size != 8*mib || got.Allocated > mib {
		t.Errorf("got %+v", got)
	}
}

func testCloneIsItsOwn(t *testing.T, e engine.Engine) {
	create(t, e, "a", 4*mib)
	data := pattern(4*mib, 2)
	writeAt(t, e, "a", data, 0)
	clone(t, e, "a", "b", 4*mib)
	writeAt(t, e, "a", []byte("source"), mib)
	writeAt(t, e, "b", []byte("clone"), 2*mib)
	wantA, wantB := bytes.Clone(data), bytes.Clone(data)
	copy(wantA[mib:], "source")
	copy(wantB[2*mib:], "clone")
	if !bytes.Equal(readAll(t, e, "a"), wantA) || !bytes.Equal(readAll(t, e, "b"), wantB) {
		t.Error("a write to one end is seen at the other")
	}
}

func testCloneOutlives(t *testing.T, e engine.Engine) {
	create(t, e, "a", 4*mib)
	data := pattern(4*mib, 3)
	writeAt(t, e, "a", data, 0)
	clone(t, e, "a", "b", 4*mib)
	clone(t, e, "b", "c", 4*mib)
	if err := e.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if err := e.Delete(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	create(t, e, "other", 8*mib) // it may get the blocks, if they were given back
	writeAt(t, e, "other", bytes.Repeat([]byte("x"), 8*mib), 0)
	if !bytes.Equal(readAll(t, e, "c"), data) {
		t.Error("the clone of the clone has lost its data with its sources")
	}
}

func testCloneBlank(t *testing.T, e engine.Engine) {
	create(t, e, "a", 4*mib)
	clone(t, e, "a", "b", 8*mib)
	if got := stat(t, e, "b"); !got.NeverWritten || got.Size != 8*mib {
		t.Errorf("got %+v", got)
	}
	writeAt(t, e, "a", []byte{0}, mib)
	clone(t, e, "a", "c", 4*mib)
	if stat(t, e, "c").NeverWritten {
		t.Error("the zero that was written was lost")
	}
}

func testCloneRefused(t *testing.T, e engine.Engine) {
	create(t, e, "a", 4*mib)
	create(t, e, "b", 4*mib)
	writeAt(t, e, "b", []byte("data"), 0)
	label := []byte("clone")
	wantKind(t, e.Clone(t.Context(), "none", "c", mib, label), errdefs.ErrNotFound)
	wantKind(t, e.Clone(t.Context(), "a", "c", 2*mib, label), errdefs.ErrOutOfRange)
	wantKind(t, e.Clone(t.Context(), "a", "b", 4*mib, label), errdefs.ErrAlreadyExists)
	wantKind(t, e.Clone(t.Context(), "a", "c", 4*mib, make([]byte, engine.MaxLabel+1)), errdefs.ErrInvalidArgument)
	if !bytes.HasPrefix(readAll(t, e, "b"), []byte("data")) {
		t.Error("the refused Clone changed an object")
	}
	names, err := e.Names(t.Context())
	if want := []engine.Name{"a", "b"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("there are %v, %v, want %v", names, err, want)
	}
}

// testCloneOfALiveObject clones while somebody writes a growing number to one block after the other. Whatever the clone
// holds, it is what the object held at one moment.
func testCloneOfALiveObject(t *testing.T, e engine.Engine) {
	const block, blocks = 4096, 512
	create(t, e, "a", blocks*block)
	f, err := os.OpenFile(e.Path("a"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		data := make([]byte, block)
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				stopped <- f.Close()
				return
			default:
			}
			binary.LittleEndian.PutUint64(data, n)
			if _, err := f.WriteAt(data, int64(n%blocks)*block); err != nil {
				stopped <- err
				return
			}
		}
	}()
	last := uint64(0)
	for range 20 {
		clone(t, e, "a", "b", blocks*block)
		data := readAll(t, e, "b")
		newest := uint64(0)
		for i := range blocks {
			newest = max(newest, binary.LittleEndian.Uint64(data[i*block:]))
		}
		for back := range uint64(min(newest, blocks)) {
			n := newest - back
			if got := binary.LittleEndian.Uint64(data[(n%blocks)*block:]); got != n {
				t.Fatalf("the clone has write %d and not write %d", newest, n)
			}
		}
		if newest < last {
			t.Fatalf("the clone has writes up to %d, the one before had %d", newest, last)
		}
		last = newest
		if err := e.Delete(t.Context(), "b"); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if last == 0 {
		t.Error("nothing was written while clones were made")
	}
}

func testCloneFull(t *testing.T, e engine.Engine) {
	create(t, e, "a", 8*mib)
	data := pattern(8*mib, 4)
	writeAt(t, e, "a", data, 0)
	c, err := e.Capacity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	create(t, e, "full", c.Total)
	scratch.Fill(t, e.Path("full"))
	err = e.Clone(t.Context(), "a", "b", 8*mib, nil)
	if err != nil {
		wantKind(t, err, errdefs.ErrResourceExhausted)
		_, err := e.Stat(t.Context(), "b")
		wantKind(t, err, errdefs.ErrNotFound)
	} else if !bytes.Equal(readAll(t, e, "b"), data) {
		t.Error("the clone in a full pool is not whole")
	}
	if !bytes.Equal(readAll(t, e, "a"), data) {
		t.Error("the clone in a full pool has harmed its source")
	}
}

func testLabel(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	clone(t, e, "a", "b", mib)
	long := bytes.Repeat([]byte("l"), engine.MaxLabel)
	if err := e.SetLabel(t.Context(), "a", long); err != nil {
		t.Fatal(err)
	}
	if err := e.Grow(t.Context(), "b", 2*mib); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[engine.Name]string{"a": string(long), "b": "clone"} {
		if got, err := e.Label(t.Context(), name); err != nil || string(got) != want {
			t.Errorf("%s has the label %.20q, %v, want %.20q", name, got, err, want)
		}
	}
	wantKind(t, e.SetLabel(t.Context(), "a", append(long, 'l')), errdefs.ErrInvalidArgument)
	wantKind(t, e.SetLabel(t.Context(), "none", nil), errdefs.ErrNotFound)
	_, err := e.Label(t.Context(), "none")
	wantKind(t, err, errdefs.ErrNotFound)
}

func testExtents(t *testing.T, e engine.Engine) {
	create(t, e, "a", 16*mib)
	if got, err := e.Extents(t.Context(), "a"); err != nil || got != (engine.Extents{}) {
		t.Errorf("a new object has %+v, %v", got, err)
	}
	writeAt(t, e, "a", pattern(8*mib, 5), 0)
	alone, err := e.Extents(t.Context(), "a")
	if err != nil || alone.Count == 0 || alone.Allocated < 8*mib || alone.Shared != 0 {
		t.Errorf("after writing: %+v, %v", alone, err)
	}
	clone(t, e, "a", "b", 16*mib)
	writeAt(t, e, "b", pattern(2*mib, 6), 0)
	got, err := e.Extents(t.Context(), "b")
	if err != nil || got.Allocated != 8*mib || got.Shared != 6*mib {
		t.Errorf("a clone with 2 of 8 MiB written is %+v, %v", got, err)
	}
	_, err = e.Extents(t.Context(), "none")
	wantKind(t, err, errdefs.ErrNotFound)
}

func testNames(t *testing.T, e engine.Engine) {
	for _, name := range []engine.Name{"c", "a", "b-1"} {
		create(t, e, name, mib)
	}
	if err := e.Delete(t.Context(), "c"); err != nil {
		t.Fatal(err)
	}
	got, err := e.Names(t.Context())
	if want := []engine.Name{"a", "b-1"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}
