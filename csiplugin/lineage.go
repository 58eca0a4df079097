package csiplugin

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
)

// cutTime is when snapshots that are cut now were cut: the time, or if the clock was set back, just after the youngest
// snapshot of the same volumes. So the order of a volume's snapshots by time is that in which they were cut.
func (s *store) cutTime(snaps []catalog.Snapshot) (time.Time, error) {
	volumes := map[handle.Volume]bool{}
	for _, snap := range snaps {
		volumes[snap.Volume] = true
	}
	now := time.Now().UTC()
	earlier, err := s.catalog.SnapshotsAfter("", func(snap catalog.Snapshot) bool {
		return volumes[snap.Volume] && snap.State == catalog.Ready
	}, 0)
	for _, snap := range earlier {
		if !snap.Created.Before(now) {
			now = snap.Created.Add(1)
		}
	}
	return now, err
}

// seal protects a snapshot's data, which comparing snapshots rests on.
func (s *store) seal(ctx context.Context, snap catalog.Snapshot) error {
	return s.protect(ctx, object(snap.ID))
}

// protect seals the object of a snapshot or of an image. Nothing in this plugin writes to it; where the right is lacking to
// keep others from it, that has to do.
func (s *store) protect(ctx context.Context, name engine.Name) error {
	err := s.changes.Seal(ctx, name)
	if errors.Is(err, errdefs.ErrPermissionDenied) {
		rpc.Logger(ctx).WarnContext(ctx, "an object is not protected against being written to", "object", string(name), rpc.LogError, err)
		return nil
	}
	return err
}
