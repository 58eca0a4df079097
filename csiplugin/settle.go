package csiplugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// recover finishes or undoes, for all volumes, what an earlier process left undone. What cannot be finished now is left to
// the next call for that volume.
func (s *store) recover(ctx context.Context) error {
	all, err := s.catalog.Volumes()
	if err != nil {
		return err
	}
	for _, v := range all {
		err := s.recoverVolume(ctx, v)
		if err == nil {
			err = s.missing(ctx, v)
		}
		if err != nil {
			rpc.Logger(ctx).WarnContext(ctx, "a volume needs attention", rpc.LogVolume, v.ID.String(), rpc.LogError, err)
		}
	}
	if err := s.recoverSnapshots(ctx); err != nil {
		return err
	}
	if err := s.images.Recover(ctx); err != nil {
		return err
	}
	return ctx.Err()
}

// recoverSnapshots removes what was being made or deleted.
func (s *store) recoverSnapshots(ctx context.Context) error {
	groups, err := s.catalog.Groups()
	if err != nil {
		return err
	}
	attention := func(id string, err error) {
		if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			rpc.Logger(ctx).WarnContext(ctx, "a snapshot needs attention", logSnapshot, id, rpc.LogError, err)
		}
	}
	for _, g := range groups {
		attention(g.ID.String(), s.settleGroup(ctx, g))
	}
	all, err := s.catalog.SnapshotsAfter("", nil, 0)
	if err != nil {
		return err
	}
	for _, snap := range all {
		if snap.Group == (handle.Group{}) {
			err := s.settleSnapshot(ctx, snap)
			if err == nil {
				_, err = s.statSnapshot(ctx, snap)
			}
			attention(snap.ID.String(), err)
		}
		if snap.State == catalog.Ready {
			attention(snap.ID.String(), s.seal(ctx, snap))
		}
	}
	return s.recoverBases(ctx)
}

func (s *store) recoverVolume(ctx context.Context, v catalog.Volume) error {
	v, err := s.settleVolume(ctx, v)
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = s.settleNode(ctx, v)
	return err
}

// missing reports a volume whose data is not what the catalog says.
func (s *store) missing(ctx context.Context, v catalog.Volume) error {
	if v.State != catalog.Ready {
		return nil
	}
	_, err := s.stat(ctx, v)
	return err
}

// settleVolume brings a volume into the state Ready, or removes it; then it is ErrNotFound.
//
// A creation is undone: nobody knows the volume's handle, and whoever wants it asks again by its name. A deletion and an
// expansion are carried on.
func (s *store) settleVolume(ctx context.Context, v catalog.Volume) (catalog.Volume, error) {
	switch {
	case v.State != catalog.Ready:
		if err := s.remove(ctx, v); err != nil {
			return v, err
		}
		return v, fmt.Errorf("volume %s: %w", v.ID, errdefs.ErrNotFound)
	case v.Expanding > 0:
		return s.expand(ctx, v)
	}
	return v, nil
}

// expand carries out the expansion that a volume's record intends.
func (s *store) expand(ctx context.Context, v catalog.Volume) (catalog.Volume, error) {
	if err := s.engine.Grow(ctx, object(v.ID), v.Expanding); err != nil {
		return v, err
	}
	crashpoint.At(ctx, "data grown")
	v.Size, v.Expanding = v.Expanding, 0
	if err := s.catalog.PutVolume(v); err != nil {
		return v, err
	}
	crashpoint.At(ctx, "expansion recorded")
	return v, nil
}

// settleNode finishes what was left undone with a volume on this node: a publish that nobody was told of is undone, an
// unpublish is carried on.
func (s *store) settleNode(ctx context.Context, v catalog.Volume) (catalog.Node, error) {
	n, err := s.catalog.Node(v.ID)
	if err != nil {
		return n, err
	}
	for _, p := range n.Publishes {
		if p.State == catalog.Published {
			continue
		}
		if err := s.takeDown(ctx, v, &n, p); err != nil {
			return n, fmt.Errorf("finish what was begun at %s: %w", p.Target, err)
		}
	}
	return n, nil
}
