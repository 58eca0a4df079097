package backup

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/protocol/rpc"
)

// Range is a range of bytes.
type Range struct {
	Offset int64 `json:"offset"`
	Size   int64 `json:"size"`
}

// Metadata is an answer of the SnapshotMetadata service.
type Metadata struct {
	Snapshot string `json:"snapshot"`
	// Base is empty if it is about all data of the snapshot, and not about what has changed.
	Base string `json:"base,omitempty"`
	// Capacity is how large the snapshot's volume was, in bytes.
	Capacity int64   `json:"capacity_bytes"`
	Ranges   []Range `json:"ranges,omitzero"`
	// Count is how many ranges there are, and Total how many bytes they have.
	Count int   `json:"range_count"`
	Total int64 `json:"total_bytes"`
}

// Ask asks for the ranges of a snapshot that hold data, or if base is not empty those in which it differs from that one,
// from an offset on. A stream that breaks is taken up again where it broke, as long as that gets on.
func Ask(ctx context.Context, client csi.SnapshotMetadataClient, snapshot, base string, offset int64) (Metadata, error) {
	m := Metadata{Snapshot: snapshot, Base: base, Ranges: []Range{}}
	for {
		before := len(m.Ranges)
		err := m.receive(ctx, client, offset)
		if err == nil || len(m.Ranges) == before || !errors.Is(err, errdefs.ErrUnavailable) {
			return m, err
		}
		last := m.Ranges[len(m.Ranges)-1]
		offset = last.Offset + last.Size
	}
}

// message is what both responses have in common.
type message interface {
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

func (m *Metadata) receive(ctx context.Context, client csi.SnapshotMetadataClient, offset int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	next, err := open(ctx, client, m.Snapshot, m.Base, offset)
	for err == nil {
		var found message
		if found, err = next(); err == nil {
			err = m.add(found)
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return rpc.FromWire(err)
}

// open begins a stream and returns what receives its messages.
func open(ctx context.Context, client csi.SnapshotMetadataClient, snapshot, base string, offset int64) (func() (message, error), error) {
	if base == "" {
		stream, err := client.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot, StartingOffset: offset})
		return func() (message, error) { return stream.Recv() }, err
	}
	stream, err := client.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: snapshot, StartingOffset: offset})
	return func() (message, error) { return stream.Recv() }, err
}

// add checks what every backup rests on: ranges are in order, do not overlap, and lie within the volume.
func (m *Metadata) add(found message) error {
	if m.Capacity != 0 && m.Capacity != found.GetVolumeCapacityBytes() {
		return fmt.Errorf("the capacity was %d and is %d: %w", m.Capacity, found.GetVolumeCapacityBytes(), errdefs.ErrDataLoss)
	}
	m.Capacity = found.GetVolumeCapacityBytes()
	for _, b := range found.GetBlockMetadata() {
		r, end := Range{Offset: b.GetByteOffset(), Size: b.GetSizeBytes()}, int64(0)
		if n := len(m.Ranges); n > 0 {
			end = m.Ranges[n-1].Offset + m.Ranges[n-1].Size
		}
		if r.Offset < end || r.Size <= 0 || r.Size > m.Capacity-r.Offset {
			return fmt.Errorf("range of %d bytes at %d after one that ends at %d, of %d: %w", r.Size, r.Offset, end, m.Capacity, errdefs.ErrDataLoss)
		}
		m.Ranges = append(m.Ranges, r)
		m.Count++
		m.Total += r.Size
	}
	return nil
}
