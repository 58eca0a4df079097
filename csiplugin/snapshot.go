package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

const logSnapshot = "snapshot"

// snapshotRequest is a CreateSnapshotRequest that says something sensible.
type snapshotRequest struct {
	name       string
	volume     handle.Volume
	parameters map[string]string
	topology   *csi.TopologyRequirement
	// format is what a backing image is exported to, and empty for an ordinary snapshot.
	format backing.Format
}

func parseSnapshot(req *csi.CreateSnapshotRequest) (r snapshotRequest, err error) {
	r = snapshotRequest{name: req.GetName(), topology: req.GetAccessibilityRequirements()}
	if err := errors.Join(checkName(r.name), checkTopology(r.topology)); err != nil {
		return r, err
	}
	if req.GetSourceVolumeId() == "" {
		return r, invalid("source_volume_id is missing")
	}
	parameters, format, err := parseSnapshotType(req.GetParameters())
	if err != nil {
		return r, err
	}
	r.format = format
	if r.parameters, err = parseSnapshotParameters(parameters); err != nil {
		return r, err
	}
	r.volume, err = handle.ParseVolume(req.GetSourceVolumeId())
	return r, err
}

// parseSnapshotParameters keeps the parameters that are this driver's own. Errors are ErrInvalidArgument.
func parseSnapshotParameters(parameters map[string]string) (map[string]string, error) {
	var ours map[string]string
	for key, value := range parameters {
		switch {
		case strings.HasPrefix(key, coPrefix):
			continue
		case key == ParameterKeepBases:
			if _, err := parseKeepBases(value); err != nil {
				return nil, err
			}
		case key != ParameterConsistency:
			return nil, invalid("parameter %.64q is not one of this driver's; it has %s and %s", key, ParameterConsistency, ParameterKeepBases)
		case value != consistencyCrash && value != consistencyFilesystem:
			return nil, invalid("parameter %s is %.64q; want %s or %s", key, value, consistencyCrash, consistencyFilesystem)
		}
		if ours == nil {
			ours = map[string]string{}
		}
		ours[key] = value
	}
	return ours, nil
}

// CreateSnapshot cuts a snapshot of a volume, in use or not; it is ready to use when the call returns. Asked again with the
// same name it returns the snapshot, or ErrAlreadyExists if another one is asked for.
func (c *controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	want, err := parseSnapshot(req)
	if err != nil {
		return nil, err
	}
	if want.format != "" {
		img, err := c.createImageSnapshot(ctx, want)
		if err != nil {
			return nil, err
		}
		return &csi.CreateSnapshotResponse{Snapshot: c.describedImage(img)}, nil
	}
	snap, err := findOrMake(ctx, c.store, "snapshot name "+want.name, want, c.existingSnapshot, c.cutOne)
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: c.describedSnapshot(snap)}, nil
}

// describedSnapshot is a snapshot as CSI describes it.
func (c *controller) describedSnapshot(s catalog.Snapshot) *csi.Snapshot {
	d := &csi.Snapshot{
		SnapshotId: s.ID.String(), SourceVolumeId: s.Volume.String(), SizeBytes: s.Size, ReadyToUse: true,
		CreationTime: timestamppb.New(s.Created), AccessibleTopology: []*csi.Topology{c.topology()},
	}
	if s.Group != (handle.Group{}) {
		d.GroupSnapshotId = s.Group.String()
	}
	return d
}

// existingSnapshot returns the snapshot of the name if it is what is wanted. ErrNotFound if there is none.
func (c *controller) existingSnapshot(ctx context.Context, want snapshotRequest) (catalog.Snapshot, error) {
	snap, err := c.catalog.SnapshotNamed(want.name)
	if err != nil {
		return snap, err
	}
	if snap.State != catalog.Ready {
		release, err := c.locks.try("snapshot " + snap.ID.String())
		if err != nil {
			return snap, err
		}
		defer release()
		if err := c.settleSnapshot(ctx, snap); err != nil {
			return snap, err
		}
	}
	switch {
	case snap.Volume != want.volume:
		err = alreadyExists("snapshot %s has the name %q and is of volume %s", snap.ID, want.name, snap.Volume)
	case !maps.Equal(snap.Parameters, want.parameters):
		err = alreadyExists("snapshot %s has the name %q and was made with the parameters %v", snap.ID, want.name, snap.Parameters)
	default:
		if elsewhere := c.reachable(want.topology); elsewhere != nil {
			err = alreadyExists("snapshot %s has the name %q and is elsewhere: %v", snap.ID, want.name, elsewhere)
		}
	}
	return snap, err
}

// cutOne cuts a new snapshot, or leaves nothing behind.
func (c *controller) cutOne(ctx context.Context, want snapshotRequest) (snap catalog.Snapshot, err error) {
	if err := c.noImageNamed(want.name); err != nil {
		return snap, err
	}
	if err := c.reachable(want.topology); err != nil {
		return snap, fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	v, release, err := c.hold(ctx, want.volume)
	if err != nil {
		return snap, err
	}
	defer release()
	if err := c.cuttable(ctx, v); err != nil {
		return snap, err
	}
	var frozen []string
	if want.parameters[ParameterConsistency] == consistencyFilesystem {
		sandboxed, restless, err := c.writers(ctx, []catalog.Volume{v})
		if err != nil {
			return snap, err
		}
		if len(restless) > 0 {
			return snap, precondition("a filesystem-consistent snapshot cannot be had: %s; or ask for %s=%s", restless[0], ParameterConsistency, consistencyCrash)
		}
		frozen = sandboxed
	}
	snap = snapshotOf(v)
	snap.Name, snap.Parameters = want.name, want.parameters
	releaseSnap, err := c.locks.try("snapshot " + snap.ID.String())
	if err != nil {
		return snap, err
	}
	defer releaseSnap()
	if err := c.catalog.Reserve(); err != nil {
		return snap, err
	}
	if err := c.catalog.PutSnapshot(snap); err != nil {
		return snap, err
	}
	crashpoint.At(ctx, "snapshot intended")
	cut := []catalog.Snapshot{snap}
	if err = c.cut(ctx, cut, frozen, nil); err == nil {
		err = c.catalog.PutSnapshot(cut[0])
	}
	if err != nil {
		undo, cancel := undoContext(ctx)
		defer cancel()
		return snap, errors.Join(err, c.removeSnapshot(undo, snap))
	}
	crashpoint.At(ctx, "snapshot recorded")
	return cut[0], nil
}

// snapshotOf is a new snapshot of a volume that is to be cut.
func snapshotOf(v catalog.Volume) catalog.Snapshot {
	return catalog.Snapshot{
		ID: handle.NewSnapshot(v.ID.Pool()), State: catalog.Creating, Volume: v.ID,
		Size: v.Size, FSType: v.FSType, Block: v.Block, Created: time.Now().UTC(),
	}
}

// cut clones the volumes of snapshots while the filesystems of those in frozen are frozen, and makes the snapshots Ready.
// If it fails, some may have been cut.
func (s *store) cut(ctx context.Context, snaps []catalog.Snapshot, frozen []string, g *catalog.Group) (err error) {
	thaw, err := s.quiet.freeze(ctx, frozen)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, thaw(ctx)) }()
	crashpoint.At(ctx, "filesystems frozen")
	now, err := s.cutTime(snaps)
	if err != nil {
		return err
	}
	for i, snap := range snaps {
		snap.State, snap.Created = catalog.Ready, now
		note, err := snapshotLabel(snap, g)
		if err != nil {
			return err
		}
		if err := s.engine.Clone(ctx, object(snap.Volume), object(snap.ID), snap.Size, note); err != nil {
			return err
		}
		crashpoint.At(ctx, "snapshot cut")
		if err := s.seal(ctx, snap); err != nil {
			return err
		}
		snaps[i] = snap
	}
	return nil
}

// DeleteSnapshot removes a snapshot; what was made from it stays as it is. A snapshot that does not exist is success, with
// the same exception as in DeleteVolume. One of a group is ErrInvalidArgument.
func (c *controller) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	err := c.deleteSnapshot(ctx, req.GetSnapshotId())
	if err := gone(err); err != nil {
		return nil, err
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// gone turns "it does not exist" into success, unless it may exist in another pool.
func gone(err error) error {
	var foreign *handle.ForeignError
	switch {
	case errors.As(err, &foreign):
		return precondition("%v", foreign.Error())
	case errors.Is(err, errdefs.ErrNotFound):
		return nil
	}
	return err
}

func (c *controller) deleteSnapshot(ctx context.Context, text string) error {
	if backing.IsHandle(text) {
		return c.deleteImage(ctx, text)
	}
	if err := backing.ForeignScheme(text); err != nil {
		return err
	}
	id, err := handle.ParseSnapshot(text)
	if err != nil {
		return err
	}
	if err := id.In(c.pool); err != nil {
		return err
	}
	snap, err := c.deleteOne(ctx, id)
	if err == nil {
		c.freeBases(ctx, snap.Volume)
	}
	return err
}

// deleteOne deletes a snapshot that is none of a group, or makes it a base.
func (c *controller) deleteOne(ctx context.Context, id handle.Snapshot) (catalog.Snapshot, error) {
	release, err := c.locks.try("snapshot " + id.String())
	if err != nil {
		return catalog.Snapshot{}, err
	}
	defer release()
	snap, err := c.catalog.Snapshot(id)
	switch {
	case err != nil:
		return snap, err
	case snap.Group != (handle.Group{}):
		return snap, invalid("snapshot %s is one of group snapshot %s; delete that", snap.ID, snap.Group)
	}
	if snap.State == catalog.Ready && keepsBases(snap) > 0 {
		err := c.keepAsBase(ctx, snap)
		if !errors.Is(err, errdefs.ErrResourceExhausted) {
			return snap, err
		}
		rpc.Logger(ctx).WarnContext(ctx, "a snapshot is deleted that should be kept as a base", logSnapshot, snap.ID.String(), rpc.LogError, err)
	}
	if snap.State == catalog.Ready {
		if err := c.engine.Idle(ctx, object(snap.ID)); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return snap, err
		}
		snap.State = catalog.Deleting
		if err := c.catalog.PutSnapshot(snap); err != nil {
			return snap, err
		}
		crashpoint.At(ctx, "deletion intended")
	}
	return snap, c.removeSnapshot(ctx, snap)
}

// removeSnapshot removes a snapshot whose record says Creating or Deleting.
func (s *store) removeSnapshot(ctx context.Context, snap catalog.Snapshot) error {
	if err := s.engine.Delete(ctx, object(snap.ID)); err != nil {
		return err
	}
	crashpoint.At(ctx, "data deleted")
	if err := s.catalog.RemoveSnapshot(snap.ID); err != nil {
		return err
	}
	crashpoint.At(ctx, "deletion recorded")
	return nil
}

// settleSnapshot removes a snapshot that was being made or deleted; then it is ErrNotFound. It is not for snapshots of
// groups.
func (s *store) settleSnapshot(ctx context.Context, snap catalog.Snapshot) error {
	if snap.State == catalog.Ready {
		return nil
	}
	if snap.State == catalog.Creating {
		s.quiet.release(ctx, []string{snap.Volume.String()})
	}
	if err := s.removeSnapshot(ctx, snap); err != nil {
		return err
	}
	return fmt.Errorf("snapshot %s: %w", snap.ID, errdefs.ErrNotFound)
}

// GetSnapshot describes a snapshot.
func (c *controller) GetSnapshot(_ context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if backing.IsHandle(req.GetSnapshotId()) {
		snap, err := c.imageSnapshot(req.GetSnapshotId())
		return &csi.GetSnapshotResponse{Snapshot: snap}, err
	}
	id, err := handle.ParseSnapshot(req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	snap, err := c.lookSnapshot(id)
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: c.describedSnapshot(snap)}, nil
}
