package extents_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/extents"
	"crust.dev/crust/csiplugin/internal/fileattr"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// FIEMAP's flags, from linux/fiemap.h.
const (
	last, unknown, delayed, encoded = 0x1, 0x2, 0x4, 0x8
	encrypted, inline, packed       = 0x80, 0x200, 0x400
	unwritten, merged, shared       = 0x800, 0x1000, 0x2000
	future                          = 0x80000000
)

func TestDifferences(t *testing.T) {
	const size = 1 << 20
	one := func(flags uint32) []extents.Extent {
		return []extents.Extent{{Logical: 8192, Physical: 1 << 20, Length: 8192, Flags: flags}}
	}
	whole := []engine.Range{{Offset: 8192, Length: 8192}}
	for name, c := range map[string]struct {
		base, target []extents.Extent
		want         []engine.Range
	}{
		"the same":                             {one(0), one(0), nil},
		"shared and last mean nothing":         {one(shared), one(last | merged), nil},
		"nothing at all":                       {nil, nil, nil},
		"written where a hole was":             {nil, one(0), whole},
		"a hole where it was written":          {one(0), nil, whole},
		"preallocated where a hole was":        {nil, one(unwritten), nil},
		"preallocated where it was written":    {one(0), one(unwritten), whole},
		"written where it was preallocated":    {one(unwritten), one(0), whole},
		"both preallocated, elsewhere":         {one(unwritten), []extents.Extent{{Logical: 8192, Physical: 5 << 20, Length: 8192, Flags: unwritten}}, nil},
		"elsewhere":                            {one(0), []extents.Extent{{Logical: 8192, Physical: 5 << 20, Length: 8192}}, whole},
		"no place is known":                    {one(unknown), one(unknown), whole},
		"not yet allocated":                    {one(delayed), one(delayed), whole},
		"compressed in the same place":         {one(encoded), one(encoded), whole},
		"encrypted in the same place":          {one(0), one(encrypted), whole},
		"inline":                               {one(inline), one(0), whole},
		"packed":                               {one(packed), one(packed), whole},
		"a flag of the future":                 {one(future), one(future), whole},
		"preallocated, but in doubt":           {one(unwritten | delayed), nil, whole},
		"cut in other pieces":                  {one(0), []extents.Extent{{Logical: 8192, Physical: 1 << 20, Length: 4096, Flags: shared}, {Logical: 12288, Physical: 1<<20 + 4096, Length: 4096}}, nil},
		"the second half is elsewhere":         {one(0), []extents.Extent{{Logical: 8192, Physical: 1 << 20, Length: 4096}, {Logical: 12288, Physical: 1 << 20, Length: 4096}}, []engine.Range{{Offset: 12288, Length: 4096}}},
		"moved by one block within the file":   {one(0), []extents.Extent{{Logical: 12288, Physical: 1 << 20, Length: 8192}}, []engine.Range{{Offset: 8192, Length: 12288}}},
		"overlapping, of which one is longer":  {one(0), []extents.Extent{{Logical: 0, Physical: 1<<20 - 8192, Length: 65536}}, []engine.Range{{Offset: 0, Length: 8192}, {Offset: 16384, Length: 49152}}},
		"beyond the end":                       {nil, []extents.Extent{{Logical: size - 4096, Physical: 1 << 20, Length: 8192}}, []engine.Range{{Offset: size - 4096, Length: 4096}}},
		"a piece that overlaps the one before": {one(0), []extents.Extent{{Logical: 8192, Physical: 1 << 20, Length: 8192}, {Logical: 12288, Physical: 9 << 20, Length: 8192}}, []engine.Range{{Offset: 16384, Length: 4096}}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, extents.Differences(c.base, c.target, size)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// file makes a file with a byte at the beginning of each of some blocks.
func file(t testing.TB, path string, fill byte, blocks ...int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	for _, b := range blocks {
		if _, err := f.WriteAt(bytes.Repeat([]byte{fill}, block), b*block); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	return f
}

func clone(t testing.TB, from *os.File, path string) *os.File {
	t.Helper()
	f := file(t, path, 0)
	if err := unix.IoctlFileClone(int(f.Fd()), int(from.Fd())); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestBlocksThatMoveMeanwhile swaps the blocks of two files between the looks at them, so that both looks find the same
// places although the files differ.
func TestBlocksThatMoveMeanwhile(t *testing.T) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := scratch.Filesystem(t, fstype, 320<<20)
			base, target := file(t, filepath.Join(dir, "base"), 'b', 1, 2, 3), file(t, filepath.Join(dir, "target"), 't', 1, 2, 3)
			was, is := clone(t, base, filepath.Join(dir, "was")), clone(t, target, filepath.Join(dir, "is"))
			swap := func(b, t *os.File) error {
				return errors.Join(unix.IoctlFileClone(int(base.Fd()), int(b.Fd())), unix.IoctlFileClone(int(target.Fd()), int(t.Fd())))
			}
			moves := 0
			var found []engine.Range
			err := extents.CompareWith(t.Context(), base, target, func() {
				// The target gets base's blocks before it is looked at, and base gets others.
				if moves++; moves == 1 {
					if err := swap(is, was); err != nil {
						t.Error(err)
					}
				}
			}, func(r engine.Range) error { found = append(found, r); return nil })
			want := []engine.Range{{Offset: block, Length: 3 * block}}
			if diff := cmp.Diff(want, found); err != nil || diff != "" || moves != 2 {
				t.Errorf("after %d looks (-want +got): %v\n%s", moves, err, diff)
			}
			// If they never come to rest, everything there is reported.
			found = nil
			err = extents.CompareWith(t.Context(), base, target, func() {
				pair := [2]*os.File{was, is}
				if moves++; moves%2 == 0 {
					pair = [2]*os.File{is, was}
				}
				if err := swap(pair[0], pair[1]); err != nil {
					t.Error(err)
				}
			}, func(r engine.Range) error { found = append(found, r); return nil })
			if diff := cmp.Diff([]engine.Range{{Offset: 0, Length: 4 * block}}, found); err != nil || diff != "" {
				t.Errorf("(-want +got): %v\n%s", err, diff)
			}
		})
	}
}

// TestImmutableFilesAreNotLookedAtTwice is about what the cost on XFS rests on, and about what it rests on in turn: the
// kernel moves nothing of an immutable file.
func TestImmutableFilesAreNotLookedAtTwice(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "xfs", 320<<20)
	base := file(t, filepath.Join(dir, "base"), 'b', 1, 3)
	target := clone(t, base, filepath.Join(dir, "target"))
	mark := func(f *os.File, on bool) {
		attr, err := fileattr.Get(f)
		if err != nil {
			t.Fatal(err)
		}
		attr.Flags &^= fileattr.Immutable
		if on {
			attr.Flags |= fileattr.Immutable
		}
		if err := fileattr.Set(f, attr); err != nil {
			t.Fatal(err)
		}
	}
	mark(base, true)
	mark(target, true)
	t.Cleanup(func() { mark(base, false); mark(target, false) })
	if _, err := os.OpenFile(base.Name(), os.O_WRONLY, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("opening an immutable file for writing: %v", err)
	}
	// Who had it open before can still have others share its blocks, but not give it others.
	other := file(t, filepath.Join(dir, "other"), 'o', 1, 3)
	if err := unix.IoctlFileClone(int(base.Fd()), int(other.Fd())); !errors.Is(err, unix.EPERM) {
		t.Errorf("cloning over an immutable file: %v", err)
	}
	looks := 0
	none := func(r engine.Range) error { t.Errorf("reported %v", r); return nil }
	if err := extents.CompareWith(t.Context(), base, target, func() { looks++ }, none); err != nil || looks != 1 {
		t.Errorf("got %v after %d looks", err, looks)
	}
	// The mark is taken off in the middle: what was looked at by then is looked at once more, and found to be the same.
	if err := extents.CompareWith(t.Context(), base, target, func() { mark(base, false) }, none); err != nil {
		t.Error(err)
	}
}

func TestFilesOfTwoFilesystemsAreRefused(t *testing.T) {
	priv.Root(t)
	a := file(t, filepath.Join(scratch.Filesystem(t, "xfs", 320<<20), "a"), 'a', 1)
	b := file(t, filepath.Join(scratch.Filesystem(t, "xfs", 320<<20), "b"), 'a', 1)
	err := extents.Compare(t.Context(), a, b, 0, func(engine.Range) error { return nil })
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("got %v", err)
	}
}

// TestManyWindows compares files of several windows, from offsets around the windows' ends.
func TestManyWindows(t *testing.T) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := scratch.Filesystem(t, fstype, 512<<20)
			const pieces = 3*extents.PerWindow + 7
			var odd, changed []int64
			var want []engine.Range
			for i := range int64(pieces) {
				odd = append(odd, 2*i+1)
				if i%3 == 0 {
					changed = append(changed, 2*i+1)
					want = append(want, engine.Range{Offset: (2*i + 1) * block, Length: block})
				}
			}
			base := file(t, filepath.Join(dir, "base"), 'b', odd...)
			target := clone(t, base, filepath.Join(dir, "target"))
			target = file(t, target.Name(), 't', changed...)
			for _, from := range []int64{0, 1, 2*extents.PerWindow - 1, 2 * extents.PerWindow, 2*extents.PerWindow + 1, 2*pieces - 1, 2 * pieces} {
				var found []engine.Range
				err := extents.Compare(context.Background(), base, target, from*block, func(r engine.Range) error { found = append(found, r); return nil })
				var rest []engine.Range
				for _, r := range want {
					if r.End() > from*block {
						rest = append(rest, r)
					}
				}
				if diff := cmp.Diff(rest, found); err != nil || diff != "" {
					t.Errorf("from %d (-want +got): %v\n%s", from, err, diff)
				}
			}
			data := 0
			err := extents.Data(t.Context(), target, 0, func(engine.Range) error { data++; return nil })
			if err != nil || data != pieces {
				t.Errorf("%d ranges of data, %v; want %d", data, err, pieces)
			}
		})
	}
}
