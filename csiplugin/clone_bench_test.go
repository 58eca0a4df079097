package csiplugin_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/internal/scratch"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
	"crust.dev/crust/test/priv"
)

// sourceData is how much data the sources of the size benchmarks hold.
const sourceData = 64 * mib

// BenchmarkSnapshotBySize cuts snapshots of sparse volumes of several sizes that hold the same data, and restores them,
// next to other ways to get a second copy of the same file.
func BenchmarkSnapshotBySize(b *testing.B) {
	h := newBigHost(b)
	for _, size := range []int64{gib, 16 * gib, 128 * gib, 1024 * gib} {
		v := h.sized(fmt.Sprint("v", size), block(), size)
		step := size / 64
		for offset := int64(0); offset < size; offset += step { // spread over the volume
			write(b, v.file(), make([]byte, sourceData/64), offset)
		}
		scratch.Run(b, "sync", v.file())
		h.compareCopies(b, fmt.Sprintf("%dGiB", size/gib), v, size == gib)
		must(b, v.delete())
	}
}

// BenchmarkSnapshotByExtents cuts snapshots of volumes that lie in more and more pieces.
func BenchmarkSnapshotByExtents(b *testing.B) {
	h := newBigHost(b)
	for _, pieces := range []int64{1 << 10, 1 << 13, 1 << 15} {
		v := h.sized(fmt.Sprint("v", pieces), block(), pieces*256<<10)
		f, err := os.OpenFile(v.file(), os.O_RDWR, 0)
		must(b, err)
		for i := range pieces {
			_, err := f.WriteAt(make([]byte, 4096), i*256<<10)
			must(b, err)
		}
		must(b, f.Sync(), f.Close())
		h.compareCopies(b, fmt.Sprintf("%dpieces", pieces), v, false)
		must(b, v.delete())
	}
}

func newBigHost(b *testing.B) *host {
	b.Helper()
	priv.Root(b)
	return newHostIn(b, filepath.Join(scratch.Filesystem(b, "xfs", 2048*gib), "pool"))
}

// compareCopies measures the ways to get a second copy of a volume. The last reads holes too and is for small ones.
func (h *host) compareCopies(b *testing.B, name string, v *volume, all bool) {
	b.Helper()
	h.t = b
	list, err := poolv1.NewPoolClient(h.conn).ListObjects(h.call(), &poolv1.ListObjectsRequest{Extents: true})
	must(b, err)
	extents := float64(list.GetObjects()[0].GetExtents())
	b.Run(name+"/snapshot", func(b *testing.B) {
		for b.Loop() {
			id := h.snapshot("s", v.id)
			b.StopTimer()
			_, err := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: id})
			must(b, err)
			b.StartTimer()
		}
		b.ReportMetric(extents, "extents")
	})
	snap := h.snapshot("s", v.id)
	b.Run(name+"/restore", func(b *testing.B) {
		for b.Loop() {
			resp, err := h.control.CreateVolume(h.call(), request("c", 0, snapshotSource(snap)))
			must(b, err)
			b.StopTimer()
			must(b, (&volume{host: h, id: resp.GetVolume().GetVolumeId()}).delete())
			b.StartTimer()
		}
	})
	_, err = h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: snap})
	must(b, err)
	h.copying(b, name+"/cp-reflink", func(to string) { scratch.Run(b, "cp", "--reflink=always", v.file(), to) })
	h.copying(b, name+"/cp-sparse", func(to string) { scratch.Run(b, "cp", "--reflink=never", "--sparse=auto", v.file(), to) })
	if all { // what csi-driver-host-path does in its image, whose cp knows neither reflinks nor holes
		h.copying(b, name+"/cp-every-byte", func(to string) { copyAll(b, v.file(), to) })
	}
}

func (h *host) copying(b *testing.B, name string, do func(to string)) {
	b.Helper()
	to := filepath.Join(h.pool, "copy")
	b.Run(name, func(b *testing.B) {
		for b.Loop() {
			do(to)
			scratch.Run(b, "sync", to)
			b.StopTimer()
			must(b, os.Remove(to))
			b.StartTimer()
		}
	})
}

func copyAll(b *testing.B, from, to string) {
	b.Helper()
	in, err := os.Open(from)
	must(b, err)
	out, err := os.Create(to)
	must(b, err)
	_, err = io.Copy(struct{ io.Writer }{out}, struct{ io.Reader }{in})
	must(b, err, in.Close(), out.Close())
}
