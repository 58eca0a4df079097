package extents_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/extents"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// bytesRead is what this process has read, by system calls and from storage (proc_pid_io(5)).
func bytesRead(t testing.TB) (calls, storage int64) {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/io")
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]int64{}
	for line := range strings.Lines(string(raw)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		values[name], _ = strconv.ParseInt(value, 10, 64)
	}
	return values["rchar"], values["read_bytes"]
}

// TestReadingDoesNotGrowWithTheVolume compares two files of 1 GiB, and two of 1 TiB with as many extents, which are not in
// any cache.
func TestReadingDoesNotGrowWithTheVolume(t *testing.T) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			dir := scratch.Filesystem(t, fstype, 512<<20)
			const count = 500
			sizes := map[string]int64{"small": 1 << 30, "large": 1 << 40}
			for name, size := range sizes {
				f := spread(t, filepath.Join(dir, name), size, count)
				base := clone(t, f, f.Name()+"-base")
				again := spread(t, f.Name(), size, count/10)
				if err := errors.Join(f.Close(), base.Close(), again.Close()); err != nil {
					t.Fatal(err)
				}
			}
			scratch.Run(t, "umount", dir)
			scratch.Run(t, "mount", "-t", fstype, "-o", "loop", filepath.Join(filepath.Dir(dir), "image"), dir)
			type cost struct{ calls, storage int64 }
			costs := map[string]cost{}
			for name := range sizes {
				base, target := reopen(t, filepath.Join(dir, name+"-base")), reopen(t, filepath.Join(dir, name))
				found := int64(0)
				calls, storage := bytesRead(t)
				if err := extents.Compare(t.Context(), base, target, 0, func(r engine.Range) error { found += r.Length; return nil }); err != nil {
					t.Fatal(err)
				}
				callsAfter, storageAfter := bytesRead(t)
				costs[name] = cost{callsAfter - calls, storageAfter - storage}
				if found != count/10*block {
					t.Errorf("%s: %d bytes are reported, want %d", name, found, count/10*block)
				}
			}
			t.Logf("read by calls and from storage: %+v", costs)
			// Reading /proc/self/io itself is a call of less than 4096 bytes.
			for name, c := range costs {
				if c.calls > 4096 || c.storage == 0 || c.storage > 1<<20 { // 0 would be out of a cache
					t.Errorf("%s: %d bytes were read by calls, %d from storage", name, c.calls, c.storage)
				}
			}
			if costs["large"].storage > costs["small"].storage+256<<10 {
				t.Errorf("reading grows with the volume: %+v", costs)
			}
		})
	}
}

// spread writes a block in each of count places of a sparse file.
func spread(t testing.TB, path string, size int64, count int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for i := range count {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(count)}, block), i*(size/500)&^(block-1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	return f
}

func reopen(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// shattered makes a file of count extents on XFS that all share two blocks, and so take no space but for the map. Every
// second block of the file is the same.
func shattered(t testing.TB, dir, name string, count int64) *os.File {
	t.Helper()
	source := file(t, filepath.Join(dir, "source"), 's', 0, 2)
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	share := func(from *os.File, fromBlock, toBlock, blocks int64) {
		t.Helper()
		err := unix.IoctlFileCloneRange(int(f.Fd()), &unix.FileCloneRange{
			Src_fd: int64(from.Fd()), Src_offset: uint64(fromBlock * block), Src_length: uint64(blocks * block), Dest_offset: uint64(toBlock * block),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	share(source, 0, 0, 1)
	share(source, 2, 1, 1)
	for made := int64(2); made < count; {
		more := min(made, count-made)
		share(f, 0, made, more)
		made += more
	}
	return f
}

// TestMemoryIsFlat compares maps of 2,000 extents, and of twenty times as many. BenchmarkCompare reports what the whole
// process takes for any number.
func TestMemoryIsFlat(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "xfs", 512<<20)
	allocated := func(count int64) uint64 {
		t.Helper()
		base := shattered(t, dir, fmt.Sprint("base-", count), count)
		target := clone(t, base, base.Name()+"-target")
		if err := unix.Fallocate(int(target.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, block); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		ranges := 0
		if err := extents.Compare(t.Context(), base, target, 0, func(engine.Range) error { ranges++; return nil }); err != nil || ranges != 1 {
			t.Fatalf("%d ranges, %v", ranges, err)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	few, many := allocated(2_000), allocated(40_000)
	t.Logf("allocated for 2,000 extents: %d bytes, for 40,000: %d", few, many)
	if many > 2<<20 || many > few+256<<10 {
		t.Errorf("memory grows with the map: %d bytes were allocated for 2,000 extents, %d for 40,000", few, many)
	}
}

// fragments are the numbers of extents that are measured. CRUST_EXTENTS has others, separated by commas.
func fragments(b *testing.B) (list []int64) {
	for text := range strings.SplitSeq(os.Getenv("CRUST_EXTENTS"), ",") {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			list = append(list, n)
		}
	}
	if list == nil {
		list = []int64{10_000, 100_000}
	}
	return list
}

// scattered makes a file of count extents on any filesystem: every second block is written, and has a place of its own.
func scattered(t testing.TB, dir, name string, count int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	for i := range count {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(i)}, block), 2*i*block); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	return f
}

// BenchmarkCompare measures comparing two files, next to walking both their maps and to comparing their bytes. Extents are
// those of both files.
func BenchmarkCompare(b *testing.B) {
	priv.Root(b)
	for _, c := range []struct {
		name, fstype string
		sealed       bool
		file         func(t testing.TB, dir, name string, count int64) *os.File
	}{
		{"xfs,sealed", "xfs", true, shattered},
		{"xfs,unsealed", "xfs", false, shattered},
		{"btrfs", "btrfs", true, scattered}, // unsealed is the same
	} {
		for _, count := range fragments(b) {
			b.Run(fmt.Sprintf("%s/extents=%d", c.name, count), func(b *testing.B) {
				dir := scratch.Filesystem(b, c.fstype, 4<<30)
				base := c.file(b, dir, "base", count)
				target := clone(b, base, base.Name()+"-target")
				if c.sealed {
					scratch.Run(b, "chattr", "+i", base.Name(), target.Name())
					b.Cleanup(func() { scratch.Run(b, "chattr", "-i", base.Name(), target.Name()) })
				}
				measure(b, base, target, 2*count)
			})
		}
	}
}

// measure reports, with the extents per second, how much more processor time comparing takes than walking both maps: on a
// machine that others use, too, the clock says little about that.
func measure(b *testing.B, base, target *os.File, count int64) {
	perSecond := func(b *testing.B) { b.ReportMetric(float64(count)*float64(b.N)/b.Elapsed().Seconds(), "extents/s") }
	walk := 0.0
	b.Run("walk", func(b *testing.B) {
		start := processorTime(b)
		for b.Loop() {
			for _, f := range []*os.File{base, target} {
				if _, err := extents.Measure(b.Context(), f); err != nil {
					b.Fatal(err)
				}
			}
		}
		walk = (processorTime(b) - start) / float64(b.N)
		perSecond(b)
	})
	b.Run("compare", func(b *testing.B) {
		start := processorTime(b)
		for b.Loop() {
			if err := extents.Compare(b.Context(), base, target, 0, func(engine.Range) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric((processorTime(b)-start)/float64(b.N)/walk, "cpu/walk's")
		perSecond(b)
		b.ReportMetric(float64(peak(b))/(1<<20), "MiB-peak-rss")
	})
	if count > 1_000_000 {
		return
	}
	b.Run("bytes", func(b *testing.B) {
		x, y := make([]byte, 1<<20), make([]byte, 1<<20)
		for b.Loop() {
			for offset := int64(0); ; offset += 1 << 20 {
				n, err := base.ReadAt(x, offset)
				if _, err := target.ReadAt(y[:n], offset); err != nil && err != io.EOF {
					b.Fatal(err)
				}
				if !bytes.Equal(x[:n], y[:n]) {
					b.Fatal("they differ")
				}
				if err == io.EOF {
					break
				}
			}
		}
		perSecond(b)
	})
}

// processorTime is what this process has taken so far, in seconds.
func processorTime(b *testing.B) float64 {
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}

// peak is the most memory that this process has had resident, in bytes (VmHWM of proc_pid_status(5)).
func peak(b *testing.B) int64 {
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(raw), "VmHWM:")
	kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	return kib << 10
}
