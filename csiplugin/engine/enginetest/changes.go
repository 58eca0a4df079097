package enginetest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/csiplugin/engine"
)

// RunChanges holds an engine that can tell what has changed to the promises of [engine.Changes]. Its objects must be files.
func RunChanges(t *testing.T, open func(t *testing.T) engine.Engine) {
	for name, test := range map[string]func(*testing.T, engine.Engine, engine.Changes){
		"data and changes are those of the writes":      changesOfWrites,
		"a sealed object is only deleted":               sealed,
		"what is not there, and who does not want more": changesErrors,
	} {
		t.Run(name, func(t *testing.T) {
			e := open(t)
			changes, ok := e.(engine.Changes)
			if !ok {
				t.Fatal("the engine has no changes")
			}
			test(t, e, changes)
		})
	}
}

// collect gathers what a call emits.
func collect(t *testing.T, call func(emit func(engine.Range) error) error) []engine.Range {
	t.Helper()
	var found []engine.Range
	if err := call(func(r engine.Range) error { found = append(found, r); return nil }); err != nil {
		t.Fatal(err)
	}
	return found
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write writes so many blocks of 4096 bytes to an object.
func write(t *testing.T, e engine.Engine, name engine.Name, block, blocks int64) {
	t.Helper()
	writeAt(t, e, name, bytes.Repeat([]byte("x"), int(blocks<<12)), block<<12)
}

func blocks(block, blocks int64) engine.Range {
	return engine.Range{Offset: block << 12, Length: blocks << 12}
}

func changesOfWrites(t *testing.T, e engine.Engine, c engine.Changes) {
	ctx := t.Context()
	must(t, e.Create(ctx, "v", 4<<20, nil))
	write(t, e, "v", 16, 64)
	write(t, e, "v", 512, 16)
	must(t, e.Clone(ctx, "v", "base", 4<<20, nil))
	must(t, c.Seal(ctx, "base"))
	write(t, e, "v", 20, 1)
	must(t, e.Grow(ctx, "v", 8<<20))
	write(t, e, "v", 1536, 16)
	must(t, e.Clone(ctx, "v", "target", 8<<20, nil))
	must(t, c.Seal(ctx, "target"))
	data := func(name engine.Name, from int64) []engine.Range {
		return collect(t, func(emit func(engine.Range) error) error { return c.Data(ctx, name, from, emit) })
	}
	changed := func(base, target engine.Name, from int64) []engine.Range {
		return collect(t, func(emit func(engine.Range) error) error { return c.Changed(ctx, base, target, from, emit) })
	}
	for what, got := range map[string][2][]engine.Range{
		"data of base":               {data("base", 0), {blocks(16, 64), blocks(512, 16)}},
		"data from within a range":   {data("base", 20<<12|1), {blocks(20, 60), blocks(512, 16)}},
		"data from within a hole":    {data("base", 100<<12), {blocks(512, 16)}},
		"data from the end on":       {data("base", 4<<20), nil},
		"changes":                    {changed("base", "target", 0), {blocks(20, 1), blocks(1536, 16)}},
		"changes from the middle on": {changed("base", "target", 21<<12), {blocks(1536, 16)}},
		"no changes":                 {changed("base", "base", 0), nil},
	} {
		if diff := cmp.Diff(got[1], got[0]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

func sealed(t *testing.T, e engine.Engine, c engine.Changes) {
	ctx := t.Context()
	must(t, e.Create(ctx, "a", 1<<20, nil))
	must(t, c.Seal(ctx, "a"))
	must(t, c.Seal(ctx, "a"))
	if f, err := os.OpenFile(e.Path("a"), os.O_WRONLY, 0); err == nil {
		_ = f.Close()
		t.Error("it can be opened for writing")
	}
	if err := os.Remove(e.Path("a")); err == nil {
		t.Error("it can be removed")
	}
	must(t, e.Idle(ctx, "a"))
	must(t, e.Clone(ctx, "a", "clone", 1<<20, nil))
	write(t, e, "clone", 0, 1)
	f, err := os.Open(e.Path("a"))
	must(t, err)
	if err := e.Delete(ctx, "a"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("deleting what is open: %v", err)
	}
	if err := e.Idle(ctx, "a"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("idle while it is open: %v", err)
	}
	must(t, f.Close())
	must(t, e.Delete(ctx, "a"))
	if _, err := e.Stat(ctx, "a"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("it is there after it was deleted: %v", err)
	}
}

func changesErrors(t *testing.T, e engine.Engine, c engine.Changes) {
	ctx := t.Context()
	must(t, e.Create(ctx, "a", 1<<20, nil))
	write(t, e, "a", 1, 1)
	write(t, e, "a", 100, 1)
	enough, none := errors.New("enough"), func(engine.Range) error { return nil }
	calls := 0
	stop := func(engine.Range) error { calls++; return enough }
	if err := c.Data(ctx, "a", 0, stop); !errors.Is(err, enough) || calls != 1 {
		t.Errorf("got %v after %d calls", err, calls)
	}
	for what, err := range map[string]error{
		"seal": c.Seal(ctx, "none"), "data": c.Data(ctx, "none", 0, none),
		"base": c.Changed(ctx, "none", "a", 0, none), "target": c.Changed(ctx, "a", "none", 0, none),
	} {
		if !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%s of what is not there: %v", what, err)
		}
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if err := c.Changed(cancelled, "a", "a", 0, none); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
