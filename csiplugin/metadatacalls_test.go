package csiplugin_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// span is a range of bytes.
type span struct{ offset, end int64 }

const page = 4096

// pages are spans of whole pages.
func pages(list ...int64) (spans []span) {
	for i := 0; i < len(list); i += 2 {
		spans = append(spans, span{list[i] * page, (list[i] + list[i+1]) * page})
	}
	return spans
}

// answer is what a stream has sent.
type answer struct {
	spans    []span
	messages int
	capacity int64
	style    csi.BlockMetadataType
}

// metadataMessage is what both responses have in common.
type metadataMessage interface {
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

// receive reads a stream to its end, or for so many messages, and holds it to what CSI says of streams.
func receive[M metadataMessage](t testing.TB, offset int64, maxResults int32, most int, recv func() (M, error)) (a answer, err error) {
	t.Helper()
	for a.messages < most {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return a, nil
		}
		if err != nil {
			return a, err
		}
		a.messages++
		if a.messages == 1 {
			a.capacity, a.style = m.GetVolumeCapacityBytes(), m.GetBlockMetadataType()
		}
		if a.capacity != m.GetVolumeCapacityBytes() || a.style != m.GetBlockMetadataType() {
			t.Errorf("capacity and type change within a stream: %v", m)
		}
		if n := len(m.GetBlockMetadata()); n > 64<<10 || maxResults > 0 && n > int(maxResults) {
			t.Errorf("a message has %d ranges, max_results is %d", n, maxResults)
		}
		for _, b := range m.GetBlockMetadata() {
			s := span{b.GetByteOffset(), b.GetByteOffset() + b.GetSizeBytes()}
			if b.GetSizeBytes() <= 0 || s.end > a.capacity || len(a.spans) > 0 && s.offset < a.spans[len(a.spans)-1].end {
				t.Errorf("range %v after %v, of %d bytes", s, a.spans, a.capacity)
			}
			if s.end <= offset {
				t.Errorf("range %v ends before the offset %d", s, offset)
			}
			a.spans = append(a.spans, s)
		}
	}
	return a, nil
}

func (h *host) allocated(snap string, offset int64, maxResults int32, most int) (answer, error) {
	h.t.Helper()
	ctx, cancel := context.WithCancel(h.call())
	defer cancel()
	stream, err := csi.NewSnapshotMetadataClient(h.conn).GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snap, StartingOffset: offset, MaxResults: maxResults})
	must(h.t, err)
	return receive(h.t, offset, maxResults, most, stream.Recv)
}

func (h *host) delta(base, target string, offset int64, maxResults int32, most int) (answer, error) {
	h.t.Helper()
	ctx, cancel := context.WithCancel(h.call())
	defer cancel()
	stream, err := csi.NewSnapshotMetadataClient(h.conn).GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: target, StartingOffset: offset, MaxResults: maxResults})
	must(h.t, err)
	return receive(h.t, offset, maxResults, most, stream.Recv)
}

const all = math.MaxInt

// fill writes whole pages of a volume's file.
func (v *volume) fill(with byte, list ...int64) {
	v.t.Helper()
	f, err := os.OpenFile(v.file(), os.O_RDWR, 0)
	must(v.t, err)
	for _, s := range pages(list...) {
		_, err := f.WriteAt(bytes.Repeat([]byte{with}, int(s.end-s.offset)), s.offset)
		must(v.t, err)
	}
	must(v.t, f.Close())
}

// pair is a volume with two snapshots between which it was changed, and grown.
func pair(h *host) (v *volume, base, target string) {
	h.t.Helper()
	v = h.create("v", block(), nil)
	v.fill('a', 16, 64, 1024, 16, 2048, 32)
	base = h.snapshot("base", v.id)
	v.fill('b', 20, 1, 40, 2, 2079, 1)
	_, err := h.control.ControllerExpandVolume(h.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 24 * mib}})
	must(h.t, err)
	v.fill('c', 5120, 16)
	return v, base, h.snapshot("target", v.id)
}
