package csiplugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
)

// snapshotMetadata is the SnapshotMetadata service (CSI, Snapshot Metadata Service RPCs): which ranges of a snapshot hold
// data, and in which it differs from an earlier one of the same volume. It reads extent maps and no data. While a stream is
// open its snapshots are held: deleting them is ErrAborted.
type snapshotMetadata struct {
	csi.UnimplementedSnapshotMetadataServer
	*store
	// block is the size in bytes of all ranges (FIXED_LENGTH), or 0 for ranges as they are (VARIABLE_LENGTH).
	block int64
}

// metadataRequest is what both requests have in common.
type metadataRequest struct {
	offset int64
	// limit is how many ranges a message may have.
	limit int
}

const (
	// usualRanges is how many ranges a message has if the CO leaves it to us, and mostRanges how many it has at most: a
	// range takes up to 24 bytes, and gRPC's clients refuse messages of more than 4 MiB unless they are told otherwise.
	usualRanges = 8 << 10
	mostRanges  = 64 << 10
)

// parseMetadata reads starting_offset and max_results. What exceeds the snapshot's size is not seen here.
func parseMetadata(offset int64, maxResults int32) (metadataRequest, error) {
	switch {
	case maxResults < 0:
		return metadataRequest{}, invalid("max_results is %d", maxResults)
	case offset < 0:
		return metadataRequest{}, outOfRange("starting_offset is %d", offset)
	case maxResults == 0:
		maxResults = usualRanges
	}
	return metadataRequest{offset: offset, limit: min(int(maxResults), mostRanges)}, nil
}

// GetMetadataAllocated sends the ranges of a snapshot that were ever written. What was preallocated, discarded or never
// touched is not among them and reads as zero.
func (m *snapshotMetadata) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	want, err := parseMetadata(req.GetStartingOffset(), req.GetMaxResults())
	if err != nil {
		return err
	}
	id, err := handle.ParseSnapshot(req.GetSnapshotId())
	if err != nil {
		return err
	}
	ctx := stream.Context()
	snap, release, err := m.holdCut(id)
	if err != nil {
		return err
	}
	defer release()
	if _, err := m.statSnapshot(ctx, snap); err != nil {
		return err
	}
	out, err := m.newRanges(ctx, want, snap, func(style csi.BlockMetadataType, list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{BlockMetadataType: style, VolumeCapacityBytes: snap.Size, BlockMetadata: list})
	})
	if err != nil {
		return err
	}
	return out.end(m.changes.Data(ctx, object(snap.ID), out.from, out.add))
}

// GetMetadataDelta sends the ranges in which a snapshot may differ from an earlier one of the same volume. All ranges that
// do are among them, also where the volume has grown in between; those that only may, like what was rewritten with the same
// bytes, do no harm but cost time.
func (m *snapshotMetadata) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	want, err := parseMetadata(req.GetStartingOffset(), req.GetMaxResults())
	if err != nil {
		return err
	}
	baseID, targetID, err := parsePair(req)
	if err != nil {
		return err
	}
	ctx := stream.Context()
	target, release, err := m.holdCut(targetID)
	if err != nil {
		return err
	}
	defer release()
	base, releaseBase, err := m.holdBase(baseID)
	if err != nil {
		return err
	}
	defer releaseBase()
	if err := m.comparable(ctx, base, target); err != nil {
		return err
	}
	out, err := m.newRanges(ctx, want, target, func(style csi.BlockMetadataType, list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{BlockMetadataType: style, VolumeCapacityBytes: target.Size, BlockMetadata: list})
	})
	if err != nil {
		return err
	}
	if base.ID == target.ID {
		return out.end(nil)
	}
	return out.end(m.changes.Changed(ctx, object(base.ID), object(target.ID), out.from, out.add))
}

// parsePair reads the ids of the two snapshots.
func parsePair(req *csi.GetMetadataDeltaRequest) (base, target handle.Snapshot, err error) {
	switch {
	case req.GetBaseSnapshotId() == "":
		err = invalid("base_snapshot_id is missing")
	case req.GetTargetSnapshotId() == "":
		err = invalid("target_snapshot_id is missing")
	default:
		if base, err = handle.ParseSnapshot(req.GetBaseSnapshotId()); err == nil {
			target, err = handle.ParseSnapshot(req.GetTargetSnapshotId())
		}
	}
	return base, target, err
}

// holdCut is holdSnapshot, but for a snapshot that is just being cut, which is ErrUnavailable: it will exist.
func (s *store) holdCut(id handle.Snapshot) (catalog.Snapshot, func(), error) {
	if snap, err := s.catalog.Snapshot(id); err == nil && snap.State == catalog.Creating {
		return snap, nil, fmt.Errorf("snapshot %s is just being cut; try again when it is ready to use: %w", id, errdefs.ErrUnavailable)
	}
	return s.holdSnapshot(id)
}

// comparable returns nil if a snapshot can be compared with an earlier one. If they do not belong together it is
// ErrInvalidArgument, and if the earlier one's data is gone ErrFailedPrecondition.
func (m *snapshotMetadata) comparable(ctx context.Context, base, target catalog.Snapshot) error {
	switch {
	case base.Volume != target.Volume:
		return invalid("snapshot %s is of volume %s and snapshot %s of volume %s; only snapshots of one volume can be compared", base.ID, base.Volume, target.ID, target.Volume)
	case base.Created.After(target.Created):
		return invalid("base snapshot %s was cut after target snapshot %s; exchange the two", base.ID, target.ID)
	}
	if _, err := m.statSnapshot(ctx, target); err != nil {
		return err
	}
	if _, err := m.statSnapshot(ctx, base); err != nil {
		if errors.Is(err, errdefs.ErrDataLoss) {
			return precondition("base snapshot %s cannot be compared with; make a full backup of %s: %v", base.ID, target.ID, err)
		}
		return err
	}
	return nil
}

// ranges sends ranges in messages.
type ranges struct {
	ctx   context.Context //nolint:containedctx // that of the stream that it is a part of
	send  func(csi.BlockMetadataType, []*csi.BlockMetadata) error
	limit int
	// from is where the ranges are to begin, and block the size of each if it is not 0.
	from, block int64
	style       csi.BlockMetadataType
	// pending have not been sent, and sent says that others have. last is the end of the last one, sent or not.
	pending []*csi.BlockMetadata
	sent    bool
	last    int64
}

// newRanges is ErrOutOfRange for an offset that exceeds the size. The size itself does not: that is where a CO goes on which
// has received everything.
func (m *snapshotMetadata) newRanges(ctx context.Context, want metadataRequest, snap catalog.Snapshot, send func(csi.BlockMetadataType, []*csi.BlockMetadata) error) (*ranges, error) {
	if want.offset > snap.Size {
		return nil, outOfRange("starting_offset is %d, snapshot %s has %d bytes", want.offset, snap.ID, snap.Size)
	}
	r := &ranges{ctx: ctx, send: send, limit: want.limit, from: want.offset, style: csi.BlockMetadataType_VARIABLE_LENGTH}
	if m.block > 0 {
		r.style, r.block = csi.BlockMetadataType_FIXED_LENGTH, fixedBlock(m.block, snap.Size)
		r.from -= r.from % r.block
	}
	return r, nil
}

// fixedBlock is the largest power of two, at most block, of which size is a multiple. So all ranges of a snapshot have one
// size, and none goes beyond its end. Sizes are multiples of 4096.
func fixedBlock(block, size int64) int64 {
	for size%block != 0 {
		block /= 2
	}
	return block
}

func (r *ranges) add(found engine.Range) error {
	if r.block == 0 {
		return r.put(found)
	}
	for start := max(found.Offset-found.Offset%r.block, r.last); start < found.End(); start += r.block {
		if err := r.put(engine.Range{Offset: start, Length: r.block}); err != nil {
			return err
		}
	}
	return nil
}

func (r *ranges) put(found engine.Range) error {
	r.pending, r.last = append(r.pending, &csi.BlockMetadata{ByteOffset: found.Offset, SizeBytes: found.Length}), found.End()
	if len(r.pending) < r.limit {
		return nil
	}
	return r.flush()
}

// flush sends a message. gRPC may look at it after Send has returned, so it is never touched again.
func (r *ranges) flush() error {
	list := r.pending
	r.pending, r.sent = nil, true
	if err := r.send(r.style, list); err != nil {
		if r.ctx.Err() != nil {
			return context.Cause(r.ctx)
		}
		return fmt.Errorf("the stream broke: %v: %w", err, errdefs.ErrUnavailable)
	}
	return nil
}

// end sends what is left, given how finding the ranges has ended. An answer without ranges is one message that says how
// large the volume is. A stream that was cancelled, or whose time is over, never ends well, even if everything was sent: its
// CO cannot know.
func (r *ranges) end(err error) error {
	if err == nil && (len(r.pending) > 0 || !r.sent) {
		err = r.flush()
	}
	if r.ctx.Err() != nil {
		return r.ctx.Err()
	}
	return err
}
