package csiplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// ParameterKeepBases is the snapshot parameter that says what becomes of a snapshot's data when it is deleted: how many
// deleted snapshots of its volume are kept as bases, so that GetMetadataDelta can still compare younger snapshots with them;
// from 0 to [MaxKeepBases]. Without it nothing is kept. A base is no snapshot any more: it is not listed, and nothing can be
// made from it. Its space is given back when as many younger bases are there, when the volume and all younger snapshots of
// it are gone, or by crustctl cbt release. When the pool is full no base is made.
const ParameterKeepBases = "crust.dev/keep-bases"

// MaxKeepBases is how many bases of a volume can be kept.
const MaxKeepBases = 16

func parseKeepBases(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > MaxKeepBases {
		return 0, invalid("parameter %s is %.64q; want 0 to %d", ParameterKeepBases, text, MaxKeepBases)
	}
	return n, nil
}

// keepsBases is how many bases of its volume a snapshot asks to keep when it is deleted.
func keepsBases(snap catalog.Snapshot) int {
	n, err := parseKeepBases(cmp.Or(snap.Parameters[ParameterKeepBases], "0"))
	if err != nil {
		return 0 // it was checked when the snapshot was made
	}
	return n
}

// keepAsBase deletes a snapshot but keeps its data. In a full pool it is ErrResourceExhausted, and the snapshot is there as
// before: who deletes something then needs the space.
func (s *store) keepAsBase(ctx context.Context, snap catalog.Snapshot) error {
	space, err := s.engine.Capacity(ctx)
	if err != nil {
		return err
	}
	if space.Free < fullPool {
		return fmt.Errorf("the pool is full, %d bytes are free: %w", space.Free, errdefs.ErrResourceExhausted)
	}
	base := catalog.Base{
		ID: snap.ID, Volume: snap.Volume, Size: snap.Size, Keep: keepsBases(snap), Created: snap.Created, Deleted: time.Now().UTC(),
	}
	note, err := label{Base: &base}.encode()
	if err != nil {
		return err
	}
	err = s.engine.SetLabel(ctx, object(snap.ID), note)
	if errors.Is(err, errdefs.ErrNotFound) {
		return s.removeSnapshot(ctx, snap) // there is nothing to keep
	}
	if err != nil {
		return err
	}
	crashpoint.At(ctx, "base noted with the data")
	if err := s.catalog.KeepBase(base); err != nil {
		return err
	}
	crashpoint.At(ctx, "snapshot made a base")
	return nil
}

// holdBase is holdCut for the older of two snapshots, which may have been deleted and kept.
func (s *store) holdBase(id handle.Snapshot) (catalog.Snapshot, func(), error) {
	snap, release, notFound := s.holdCut(id)
	if !errors.Is(notFound, errdefs.ErrNotFound) || id.In(s.pool) != nil {
		return snap, release, notFound
	}
	release, err := s.locks.share("snapshot " + id.String())
	if err != nil {
		return snap, nil, err
	}
	base, err := s.catalog.Base(id)
	if err != nil {
		release()
		if errors.Is(err, errdefs.ErrNotFound) {
			err = notFound
		}
		return snap, nil, err
	}
	return catalog.Snapshot{ID: base.ID, State: catalog.Ready, Volume: base.Volume, Size: base.Size, Created: base.Created}, release, nil
}

// dispensable returns which of a volume's bases nobody can need: those with enough younger ones beside them, and all that
// no snapshot can be compared with, now or later.
func dispensable(bases []catalog.Base, volumeExists bool, snapshots []catalog.Snapshot) []catalog.Base {
	bases = slices.Clone(bases)
	slices.SortStableFunc(bases, func(a, b catalog.Base) int { return b.Created.Compare(a.Created) })
	var free []catalog.Base
	for younger, base := range bases {
		comparable := volumeExists || slices.ContainsFunc(snapshots, func(snap catalog.Snapshot) bool { return !snap.Created.Before(base.Created) })
		if younger >= base.Keep || !comparable {
			free = append(free, base)
		}
	}
	return free
}

// freeBases gives back what the bases of a volume need not hold any more. That it fails is no reason for the call to fail
// that it is a part of: the next one, and the next start, try again.
func (s *store) freeBases(ctx context.Context, volume handle.Volume) {
	if err := s.tryFreeBases(ctx, volume); err != nil {
		rpc.Logger(ctx).WarnContext(ctx, "a base that nobody needs is still there", rpc.LogVolume, volume.String(), rpc.LogError, err)
	}
}

func (s *store) tryFreeBases(ctx context.Context, volume handle.Volume) error {
	all, err := s.catalog.Bases()
	if err != nil {
		return err
	}
	of := slices.DeleteFunc(all, func(b catalog.Base) bool { return b.Volume != volume })
	if len(of) == 0 {
		return nil
	}
	v, err := s.catalog.Volume(volume)
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	exists := err == nil && v.State == catalog.Ready
	snapshots, err := s.catalog.SnapshotsAfter("", func(snap catalog.Snapshot) bool {
		return snap.Volume == volume && snap.State != catalog.Deleting
	}, 0)
	if err != nil {
		return err
	}
	var errs []error
	for _, base := range dispensable(of, exists, snapshots) {
		errs = append(errs, s.freeBase(ctx, base.ID))
	}
	return errors.Join(errs...)
}

// freeBase gives back the data of a base. It is ErrAborted while somebody compares with it.
func (s *store) freeBase(ctx context.Context, id handle.Snapshot) error {
	release, err := s.locks.try("snapshot " + id.String())
	if err != nil {
		return err
	}
	defer release()
	if _, err := s.catalog.Base(id); err != nil {
		return err
	}
	if err := s.engine.Delete(ctx, object(id)); err != nil {
		return err
	}
	crashpoint.At(ctx, "data of a base deleted")
	if err := s.catalog.RemoveBase(id); err != nil {
		return err
	}
	crashpoint.At(ctx, "base forgotten")
	return nil
}

// recoverBases frees what an earlier process did not come to free, and protects the others again.
func (s *store) recoverBases(ctx context.Context) error {
	all, err := s.catalog.Bases()
	if err != nil {
		return err
	}
	volumes := map[handle.Volume]bool{}
	for _, base := range all {
		volumes[base.Volume] = true
	}
	for volume := range volumes {
		s.freeBases(ctx, volume)
	}
	if all, err = s.catalog.Bases(); err != nil {
		return err
	}
	for _, base := range all {
		if err := s.seal(ctx, catalog.Snapshot{ID: base.ID}); err != nil {
			rpc.Logger(ctx).WarnContext(ctx, "a base needs attention; release it", logSnapshot, base.ID.String(), rpc.LogError, err)
		}
	}
	return nil
}

// basesService is the Bases service.
type basesService struct {
	poolv1.UnsafeBasesServer
	*store
}

// ListBases is that of the API.
func (b *basesService) ListBases(ctx context.Context, _ *poolv1.ListBasesRequest) (*poolv1.ListBasesResponse, error) {
	all, err := b.catalog.Bases()
	if err != nil {
		return nil, err
	}
	resp := &poolv1.ListBasesResponse{}
	for _, base := range all {
		lies, err := b.engine.Extents(ctx, object(base.ID))
		if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return nil, err
		}
		resp.Bases = append(resp.Bases, &poolv1.Base{
			Id: base.ID.String(), Volume: base.Volume.String(), SizeBytes: base.Size, HeldBytes: lies.Allocated - lies.Shared,
			Keep: int32(base.Keep), Created: timestamppb.New(base.Created), Deleted: timestamppb.New(base.Deleted),
		})
	}
	return resp, nil
}

// ReleaseBase is that of the API.
func (b *basesService) ReleaseBase(ctx context.Context, req *poolv1.ReleaseBaseRequest) (*poolv1.ReleaseBaseResponse, error) {
	id, err := handle.ParseSnapshot(req.GetId())
	if err == nil {
		err = id.In(b.pool)
	}
	if err == nil {
		err = b.freeBase(ctx, id)
	}
	if err := gone(err); err != nil {
		return nil, err
	}
	return &poolv1.ReleaseBaseResponse{}, nil
}
