package extents_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

func TestMain(m *testing.M) { os.Exit(scratch.Main(m)) }

var histories = flag.Int("histories", 100, "how many random histories each filesystem goes through")

const (
	block  = 4096
	blocks = 192 // of a volume, at first
)

// zeros are the content of a hole.
var zeros = strings.Repeat("\x00", block)

// history is the life of one volume: random changes, and snapshots in between.
type history struct {
	testing.TB
	*rand.Rand
	e      *reflink.Engine
	live   engine.Name
	log    []string
	made   int
	taken  []engine.Name
	counts *counts
	// contents are those of snapshots, if it is not nil: for volumes that take long to read.
	contents map[engine.Name][]byte
}

// counts are blocks, over all comparisons.
type counts struct {
	comparisons, differing, reported, blocks int
}

func (h *history) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatalf("%v\nafter %v", err, h.log)
	}
}

func (h *history) name(kind string) engine.Name {
	h.made++
	return engine.Name(fmt.Sprintf("%s-%d", kind, h.made))
}

func (h *history) open() *os.File {
	f, err := os.OpenFile(h.e.Path(h.live), os.O_RDWR, 0)
	h.must(err)
	return f
}

// extent draws where something happens: mostly whole blocks, which is how a guest writes, and at times single bytes.
func (h *history) extent(size int64) (offset, length int64) {
	offset = h.Int64N(size/block) * block
	length = min((1+h.Int64N(1+h.Int64N(32)))*block, size-offset)
	if h.IntN(8) == 0 {
		offset += h.Int64N(block)
		length = min(1+h.Int64N(2*block), size-offset)
	}
	return offset, length
}

// change changes the volume in a random way.
func (h *history) change() {
	f := h.open()
	defer f.Close()
	info, err := f.Stat()
	h.must(err)
	size := info.Size()
	offset, length := h.extent(size)
	note := func(what string) { h.log = append(h.log, fmt.Sprintf("%s %d+%d", what, offset, length)) }
	fallocate := func(mode uint32) error {
		return unix.Fallocate(int(f.Fd()), mode|unix.FALLOC_FL_KEEP_SIZE, offset, length)
	}
	switch h.IntN(12) {
	case 0, 1, 2:
		note("write")
		h.write(f, offset, length)
	case 3:
		note("write zeros")
		_, err = f.WriteAt(make([]byte, length), offset)
	case 4:
		note("rewrite the same")
		same := make([]byte, length)
		_, err = f.ReadAt(same, offset)
		h.must(err)
		_, err = f.WriteAt(same, offset)
	case 5:
		note("punch")
		err = fallocate(unix.FALLOC_FL_PUNCH_HOLE)
	case 6:
		note("zero range")
		err = fallocate(unix.FALLOC_FL_ZERO_RANGE)
	case 7:
		note("preallocate")
		err = fallocate(0)
	case 8:
		note("preallocate and write a part")
		h.must(fallocate(0))
		h.write(f, offset+length/4, 1+length/4)
	case 9:
		note("write with and without sync")
		h.write(f, offset, length)
		if h.IntN(2) == 0 {
			err = f.Sync()
		}
	case 10:
		if size < 4*blocks*block {
			note("expand")
			err = h.e.Grow(h.Context(), h.live, size+h.Int64N(64)*block)
		}
	case 11:
		note("share a part with another")
		err = unix.IoctlFileCloneRange(int(f.Fd()), &unix.FileCloneRange{
			Src_fd: int64(f.Fd()), Src_offset: uint64(offset &^ (block - 1)), Src_length: block,
			Dest_offset: uint64(h.Int64N(size/block) * block),
		})
		if err == unix.EINVAL { // onto itself
			err = nil
		}
	}
	h.must(err)
}

func (h *history) write(f *os.File, offset, length int64) {
	data := make([]byte, length)
	for i := range data {
		data[i] = byte(h.Uint32())
	}
	_, err := f.WriteAt(data, offset)
	h.must(err)
}

// snapshot takes a snapshot, and compares it with those before it.
func (h *history) snapshot() {
	h.log = append(h.log, "snapshot")
	st, err := h.e.Stat(h.Context(), h.live)
	h.must(err)
	name := h.name("snap")
	h.must(h.e.Clone(h.Context(), h.live, name, st.Size, nil))
	h.must(h.e.Seal(h.Context(), name))
	for _, base := range h.taken {
		h.compare(base, name)
	}
	h.data(name)
	h.taken = append(h.taken, name)
}

func (h *history) content(name engine.Name) []byte {
	if raw, ok := h.contents[name]; ok {
		return raw
	}
	raw, err := os.ReadFile(h.e.Path(name))
	h.must(err)
	if h.contents != nil {
		h.contents[name] = raw
	}
	return raw
}

// blockOf is block number i of a content. Comparing strings is what the race detector does not look at; it takes long for it.
func blockOf(content []byte, i int) string { return string(content[i*block : (i+1)*block]) }

// covered gathers what a call emits as a bit for each block, and checks the order.
func (h *history) covered(size int, call func(emit func(engine.Range) error) error) []bool {
	h.Helper()
	found := make([]bool, size/block)
	last := int64(-1)
	h.must(call(func(r engine.Range) error {
		if r.Offset <= last || r.Length <= 0 || r.End() > int64(size) || r.Offset%block != 0 || r.Length%block != 0 {
			h.Fatalf("range %v after one that ends at %d, of %d bytes\nafter %v", r, last, size, h.log)
		}
		for b := r.Offset / block; b < r.End()/block; b++ {
			found[b] = true
		}
		last = r.End()
		return nil
	}))
	return found
}

// compare holds the ranges that are reported as changed against the bytes.
func (h *history) compare(base, target engine.Name) {
	h.Helper()
	b, t := h.content(base), h.content(target)
	b = append(b, make([]byte, max(0, len(t)-len(b)))...)
	found := h.covered(len(t), func(emit func(engine.Range) error) error {
		return h.e.Changed(context.Background(), base, target, 0, emit)
	})
	h.counts.comparisons++
	for i, reported := range found {
		differs := blockOf(b, i) != blockOf(t, i)
		h.counts.blocks++
		if reported {
			h.counts.reported++
		}
		if differs {
			h.counts.differing++
		}
		if differs && !reported {
			h.Fatalf("block %d differs between %s and %s and is not reported\nafter %v", i, base, target, h.log)
		}
	}
}

// data holds the ranges that are reported as data against the bytes.
func (h *history) data(name engine.Name) {
	h.Helper()
	content := h.content(name)
	found := h.covered(len(content), func(emit func(engine.Range) error) error {
		return h.e.Data(context.Background(), name, 0, emit)
	})
	for i, reported := range found {
		if !reported && blockOf(content, i) != zeros {
			h.Fatalf("block %d of %s has data that is not reported\nafter %v", i, name, h.log)
		}
	}
}

// turn replaces the volume by a clone of itself or of a snapshot, or deletes a snapshot in the middle.
func (h *history) turn() {
	switch which := h.IntN(3); {
	case which == 0 && len(h.taken) > 0:
		h.log = append(h.log, "restore")
		h.replace(h.taken[h.IntN(len(h.taken))])
	case which == 1:
		h.log = append(h.log, "clone")
		h.replace(h.live)
	case len(h.taken) > 1:
		h.log = append(h.log, "delete")
		i := h.IntN(len(h.taken))
		h.must(h.e.Delete(h.Context(), h.taken[i]))
		h.taken = append(h.taken[:i], h.taken[i+1:]...)
	}
}

func (h *history) replace(from engine.Name) {
	st, err := h.e.Stat(h.Context(), from)
	h.must(err)
	name := h.name("vol")
	h.must(h.e.Clone(h.Context(), from, name, st.Size, nil))
	old := h.live
	h.live = name
	h.must(h.e.Delete(h.Context(), old))
}

// run goes through one history.
func (h *history) run() {
	h.live = h.name("vol")
	h.must(h.e.Create(h.Context(), h.live, blocks*block, nil))
	for range 3 + h.IntN(3) {
		for range 1 + h.IntN(6) {
			h.change()
		}
		if h.IntN(4) == 0 {
			h.turn()
		}
		h.snapshot()
	}
	for _, name := range append(h.taken, h.live) {
		h.must(h.e.Delete(h.Context(), name))
	}
}

// TestHistories compares what is reported with the bytes, after random histories. What is reported and does not differ is
// counted: identical rewrites, zeros written where a hole was, and the like.
func TestHistories(t *testing.T) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := filepath.Join(scratch.Filesystem(t, fstype, 512<<20), "objects")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			e, err := reflink.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			var sum counts
			seed := rand.Uint64()
			for i := range *histories {
				h := &history{TB: t, Rand: rand.New(rand.NewPCG(seed, uint64(i))), e: e, counts: &sum}
				h.run()
				if t.Failed() {
					t.Fatalf("history %d of seed %d", i, seed)
				}
			}
			if sum.differing == 0 || sum.comparisons < *histories {
				t.Errorf("the histories prove nothing: %+v", sum)
			}
			t.Logf("%d histories, %d comparisons of %d blocks: %d differ, %d are reported, %d of them needlessly; none is missed",
				*histories, sum.comparisons, sum.blocks, sum.differing, sum.reported, sum.reported-sum.differing)
		})
	}
}
