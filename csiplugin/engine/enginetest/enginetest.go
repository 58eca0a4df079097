package enginetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/internal/scratch"
)

const mib = 1 << 20

// Run holds the engine that open returns to the promises of engine.Engine. open returns an engine whose pool is empty, has
// room for at least 64 MiB and is the test's own.
func Run(t *testing.T, open func(t *testing.T) engine.Engine) {
	tests := map[string]func(*testing.T, engine.Engine){
		"a new object is blank and takes no space":      testNew,
		"creating twice is success":                     testCreateTwice,
		"an object that differs is not taken for a new": testCreateOther,
		"growing keeps the data and adds zeros":         testGrow,
		"one byte anywhere is data":                     testOneByte,
		"erasing makes an object blank":                 testErase,
		"what is in use is neither erased nor deleted":  testInUse,
		"deleting twice is success":                     testDelete,
		"what does not exist is not found":              testMissing,
		"a full pool refuses and harms nothing":         testFull,
	}
	maps.Copy(tests, cloneTests())
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func create(t *testing.T, e engine.Engine, name engine.Name, size int64) {
	t.Helper()
	if err := e.Create(t.Context(), name, size, []byte("label")); err != nil {
		t.Fatal(err)
	}
}

func stat(t *testing.T, e engine.Engine, name engine.Name) engine.Stat {
	t.Helper()
	st, err := e.Stat(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func wantKind(t *testing.T, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got error %v, want %v", err, kind)
	}
}

func writeAt(t *testing.T, e engine.Engine, name engine.Name, data []byte, offset int64) {
	t.Helper()
	f, err := os.OpenFile(e.Path(name), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(data, offset); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func readAll(t *testing.T, e engine.Engine, name engine.Name) []byte {
	t.Helper()
	f, err := os.Open(e.Path(name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	data, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func testNew(t *testing.T, e engine.Engine) {
	create(t, e, "a", 16*mib)
	got := stat(t, e, "a")
	if want := (engine.Stat{Size: 16 * mib, Allocated: got.Allocated, NeverWritten: true}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got.Allocated > mib {
		t.Errorf("a new object takes %d bytes", got.Allocated)
	}
	if info, err := os.Stat(e.Path("a")); err != nil || info.Mode().Perm()&0o077 != 0 {
		t.Errorf("the object is %v (%v), others than root must not get at it", info.Mode(), err)
	}
	if err := e.Idle(t.Context(), "a"); err != nil {
		t.Errorf("nobody uses it: %v", err)
	}
}

func testCreateTwice(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	create(t, e, "a", mib)
}

func testCreateOther(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	wantKind(t, e.Create(t.Context(), "a", 2*mib, nil), errdefs.ErrAlreadyExists)
	writeAt(t, e, "a", []byte("data"), 0)
	wantKind(t, e.Create(t.Context(), "a", mib, nil), errdefs.ErrAlreadyExists)
	if got := readAll(t, e, "a"); !bytes.HasPrefix(got, []byte("data")) || len(got) != mib {
		t.Error("the refused Create changed the object")
	}
}

func testGrow(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	writeAt(t, e, "a", []byte("end"), mib-3)
	for _, size := range []int64{4 * mib, 4 * mib, 2 * mib} {
		if err := e.Grow(t.Context(), "a", size); err != nil {
			t.Fatal(err)
		}
	}
	want := append(append(make([]byte, mib-3), "end"...), make([]byte, 3*mib)...)
	if !bytes.Equal(readAll(t, e, "a"), want) {
		t.Error("growing changed the data, or the new part is not zero")
	}
	if got := stat(t, e, "a").Allocated; got > mib {
		t.Errorf("growing has allocated %d bytes", got)
	}
}

func testOneByte(t *testing.T, e engine.Engine) {
	for name, offset := range map[engine.Name]int64{"first": 0, "middle": 4 * mib, "last": 8*mib - 1} {
		create(t, e, name, 8*mib)
		writeAt(t, e, name, []byte{0}, offset) // a zero that was written is data, too
		if stat(t, e, name).NeverWritten {
			t.Errorf("one byte at the %s offset was not seen", name)
		}
	}
}

func testErase(t *testing.T, e engine.Engine) {
	create(t, e, "a", 8*mib)
	writeAt(t, e, "a", bytes.Repeat([]byte("x"), 2*mib), 3*mib)
	for range 2 {
		if err := e.Erase(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	if got := stat(t, e, "a"); !got.NeverWritten || got.Size != 8*mib {
		t.Errorf("after Erase: %+v", got)
	}
	if !bytes.Equal(readAll(t, e, "a"), make([]byte, 8*mib)) {
		t.Error("data is left")
	}
}

// testInUse has the object open in this process, then in another one.
func testInUse(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	writeAt(t, e, "a", []byte("data"), 0)
	refused := func(who string) {
		t.Helper()
		for _, do := range []func(context.Context, engine.Name) error{e.Idle, e.Erase, e.Delete} {
			err := do(t.Context(), "a")
			wantKind(t, err, errdefs.ErrFailedPrecondition)
			if err != nil && !strings.Contains(err.Error(), who) {
				t.Errorf("%q does not name %q", err, who)
			}
		}
		if !bytes.HasPrefix(readAll(t, e, "a"), []byte("data")) {
			t.Error("the data of an object in use has gone")
		}
	}
	f, err := os.Open(e.Path("a"))
	if err != nil {
		t.Fatal(err)
	}
	refused("in use")

	other := exec.Command("sleep", "60")
	other.Stdin = f
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	refused("sleep")
	_ = other.Process.Kill()
	_ = other.Wait()

	if err := e.Idle(t.Context(), "a"); err != nil {
		t.Errorf("nobody uses it any more: %v", err)
	}
	if err := e.Delete(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

func testDelete(t *testing.T, e engine.Engine) {
	create(t, e, "a", mib)
	create(t, e, "b", mib)
	for range 2 {
		if err := e.Delete(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := e.Stat(t.Context(), "a")
	wantKind(t, err, errdefs.ErrNotFound)
	stat(t, e, "b")
}

func testMissing(t *testing.T, e engine.Engine) {
	_, err := e.Stat(t.Context(), "none")
	wantKind(t, err, errdefs.ErrNotFound)
	wantKind(t, e.Grow(t.Context(), "none", mib), errdefs.ErrNotFound)
	wantKind(t, e.Erase(t.Context(), "none"), errdefs.ErrNotFound)
	wantKind(t, e.Idle(t.Context(), "none"), errdefs.ErrNotFound)
}

func testFull(t *testing.T, e engine.Engine) {
	create(t, e, "keep", mib)
	writeAt(t, e, "keep", []byte("data"), 0)
	c, err := e.Capacity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if c.Free <= 0 || c.Free > c.Total {
		t.Fatalf("capacity %+v", c)
	}
	create(t, e, "full", c.Total)
	scratch.Fill(t, e.Path("full"))
	// Names and sizes may still fit in; what must not happen is another error, or harm.
	if err := e.Create(t.Context(), "more", mib, nil); err != nil {
		wantKind(t, err, errdefs.ErrResourceExhausted)
	}
	if !bytes.HasPrefix(readAll(t, e, "keep"), []byte("data")) {
		t.Error("a full pool has harmed an object")
	}
	if err := e.Delete(t.Context(), "full"); err != nil {
		t.Fatalf("deleting from a full pool: %v", err)
	}
	create(t, e, "after", 8*mib)
	writeAt(t, e, "after", bytes.Repeat([]byte("x"), 8*mib), 0)
}
