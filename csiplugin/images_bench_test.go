package csiplugin_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/backing/convert"
	"crust.dev/crust/csiplugin/internal/scratch"
)

// BenchmarkRestoreFromAnImage makes volumes from prepared images of several sizes. All of their data is allocated.
func BenchmarkRestoreFromAnImage(b *testing.B) {
	for _, size := range []int64{16 * mib, 128 * mib, 1024 * mib} {
		b.Run(fmt.Sprintf("%dMiB", size/mib), func(b *testing.B) {
			h := newImagesHost(b)
			v := h.clone("source", nil, size)
			fillDisk(b, v.file(), size)
			handle := h.imageSnapshot("image", v.id, "raw").GetSnapshotId()
			for b.Loop() {
				w, err := h.restore("w", handle, 0)
				must(b, err)
				b.StopTimer()
				must(b, (&volume{host: h, id: w.GetVolumeId()}).delete())
				b.StartTimer()
			}
		})
	}
}

// fillDisk writes data that does not compress.
func fillDisk(t testing.TB, path string, size int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	r, block := rand.NewChaCha8([32]byte{2}), make([]byte, mib)
	for range size / mib {
		_, _ = r.Read(block)
		_, err := f.Write(block)
		must(t, err)
	}
	must(t, f.Sync(), f.Close())
}

// BenchmarkConvert has the child convert a disk full of data, and bare qemu-img next to it. Both end with the result on disk. They
// take turns, after one round that does not count: what is written to a place for the first time takes several times as long,
// because the file under the filesystem gets its blocks then. What is reported is the median of each.
func BenchmarkConvert(b *testing.B) {
	const size = 256 * mib
	dir := filepath.Join(scratch.Filesystem(b, "xfs", 2*gib), "images")
	must(b, os.Mkdir(dir, 0o700))
	raw, packed := filepath.Join(dir, "raw"), filepath.Join(dir, "packed")
	fillDisk(b, raw, size)
	c := convert.New(convert.Config{Dir: dir})
	must(b, c.Convert(b.Context(), convert.Job{From: convert.Image{Path: raw, Format: backing.Raw}, To: convert.Image{Path: packed, Format: backing.QCOW2}, VirtualSize: size}))
	out := filepath.Join(dir, "out")
	for _, row := range []struct {
		name     string
		from, to convert.Image
	}{
		{"to qcow2", convert.Image{Path: raw, Format: backing.Raw}, convert.Image{Path: out, Format: backing.QCOW2}},
		{"to raw", convert.Image{Path: packed, Format: backing.QCOW2}, convert.Image{Path: out, Format: backing.Raw}},
	} {
		b.Run(row.name, func(b *testing.B) {
			child := func() {
				must(b, c.Convert(b.Context(), convert.Job{From: row.from, To: row.to, VirtualSize: size}))
			}
			bare := func() {
				scratch.Run(b, "qemu-img", "convert", "-f", string(row.from.Format), "-O", string(row.to.Format), row.from.Path, out)
				f, err := os.OpenFile(out, os.O_RDWR, 0)
				must(b, err, f.Sync(), f.Close())
			}
			took := map[string][]time.Duration{}
			turn := func(name string, convert func()) {
				start := time.Now()
				convert()
				took[name] = append(took[name], time.Since(start))
				must(b, os.Remove(out))
			}
			turn("not counted", child)
			turn("not counted", bare)
			for b.Loop() {
				turn("child", child)
				turn("bare", bare)
			}
			for _, name := range []string{"child", "bare"} {
				slices.Sort(took[name])
				b.ReportMetric(size/mib/took[name][len(took[name])/2].Seconds(), name+"-MiB/s")
			}
		})
	}
}

// BenchmarkExport exports a volume full of data: the snapshot is ready at the end.
func BenchmarkExport(b *testing.B) {
	const size = 256 * mib
	for _, format := range []string{"raw", "qcow2"} {
		b.Run(format, func(b *testing.B) {
			h := newImagesHost(b)
			v := h.clone("source", nil, size)
			fillDisk(b, v.file(), size)
			b.SetBytes(size)
			for b.Loop() {
				must(b, h.deleteSnapshot(h.imageSnapshot("image", v.id, format).GetSnapshotId()))
			}
		})
	}
}

// BenchmarkDownload prepares an image from a server of this machine, with its checksum.
func BenchmarkDownload(b *testing.B) {
	const size = 256 * mib
	path := filepath.Join(scratch.Dir(b), "image")
	fillDisk(b, path, size)
	s := backingtest.Serve(b, func(_ int, w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, path) })
	h := newImagesHost(b)
	b.SetBytes(size)
	for b.Loop() {
		handle := onDemand("image", s.URL)
		w, err := h.restore("w", handle, 0)
		must(b, err)
		must(b, (&volume{host: h, id: w.GetVolumeId()}).delete(), h.deleteSnapshot(handle))
	}
}
