package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// groupController is the GroupController service.
type groupController struct {
	csi.UnimplementedGroupControllerServer
	*controller
}

func (g *groupController) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
		}},
	}}}, nil
}

// maxMembers is how many volumes a group snapshot may have: as many as crustd freezes at a time.
const maxMembers = 256

// groupRequest is a CreateVolumeGroupSnapshotRequest that says something sensible.
type groupRequest struct {
	name string
	// volumes in the order of their handles, each once.
	volumes    []handle.Volume
	parameters map[string]string
}

func parseGroup(req *csi.CreateVolumeGroupSnapshotRequest) (r groupRequest, err error) {
	r.name = req.GetName()
	if err := checkName(r.name); err != nil {
		return r, err
	}
	if n := len(req.GetSourceVolumeIds()); n == 0 || n > maxMembers {
		return r, invalid("source_volume_ids has %d entries, want 1 to %d", n, maxMembers)
	}
	for i, text := range slices.Sorted(slices.Values(req.GetSourceVolumeIds())) {
		if text == "" {
			return r, invalid("source_volume_ids has an empty entry")
		}
		id, err := handle.ParseVolume(text)
		if err != nil {
			return r, err
		}
		if i > 0 && r.volumes[i-1] == id {
			return r, invalid("source_volume_ids names volume %s twice", id)
		}
		r.volumes = append(r.volumes, id)
	}
	if _, err := handle.OnePool(r.volumes); err != nil {
		return r, err
	}
	if _, keep := req.GetParameters()[ParameterKeepBases]; keep {
		return r, invalid("parameter %s is for snapshots that are deleted one by one, not for groups", ParameterKeepBases)
	}
	r.parameters, err = parseSnapshotParameters(req.GetParameters())
	return r, err
}

// CreateVolumeGroupSnapshot cuts snapshots of several volumes at one moment. Volumes in use are held still while they are
// cut, so that of two writes, of which the second began when the first had ended, never only the second is in it, whatever
// volumes they went to. Where that cannot be had it is ErrFailedPrecondition, and nothing is cut.
func (g *groupController) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	want, err := parseGroup(req)
	if err != nil {
		return nil, err
	}
	made, err := findOrMake(ctx, g.store, "group snapshot name "+want.name, want, g.existingGroup, g.cutGroup)
	if err != nil {
		return nil, err
	}
	described, err := g.describedGroup(made)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: described}, nil
}

// describedGroup is a group snapshot as CSI describes it.
func (g *groupController) describedGroup(group catalog.Group) (*csi.VolumeGroupSnapshot, error) {
	d := &csi.VolumeGroupSnapshot{GroupSnapshotId: group.ID.String(), CreationTime: timestamppb.New(group.Created), ReadyToUse: true}
	members, err := g.members(group)
	for _, member := range members {
		d.Snapshots = append(d.Snapshots, g.describedSnapshot(member))
	}
	return d, err
}

func (s *store) members(group catalog.Group) ([]catalog.Snapshot, error) {
	var members []catalog.Snapshot
	for _, id := range group.Members {
		member, err := s.catalog.Snapshot(id)
		if err != nil {
			return nil, fmt.Errorf("member of group snapshot %s: %w", group.ID, err)
		}
		members = append(members, member)
	}
	return members, nil
}

// existingGroup returns the group snapshot of the name if it is what is wanted. ErrNotFound if there is none.
func (g *groupController) existingGroup(ctx context.Context, want groupRequest) (catalog.Group, error) {
	group, err := g.catalog.GroupNamed(want.name)
	if err != nil {
		return group, err
	}
	release, err := g.locks.try("group snapshot " + group.ID.String())
	if err != nil {
		return group, err
	}
	defer release()
	if err := g.settleGroup(ctx, group); err != nil {
		return group, err
	}
	members, err := g.members(group)
	if err != nil {
		return group, err
	}
	var volumes []handle.Volume
	for _, member := range members {
		volumes = append(volumes, member.Volume)
	}
	if !slices.Equal(volumes, want.volumes) || !maps.Equal(group.Parameters, want.parameters) {
		return group, alreadyExists("group snapshot %s has the name %q and is of the volumes %v, with the parameters %v", group.ID, want.name, volumes, group.Parameters)
	}
	return group, nil
}

// cutGroup cuts a new group snapshot, or leaves nothing behind.
func (g *groupController) cutGroup(ctx context.Context, want groupRequest) (catalog.Group, error) {
	held, release, err := g.holdAll(ctx, want.volumes)
	if err != nil {
		return catalog.Group{}, err
	}
	defer release()
	frozen, err := g.planFreeze(ctx, held, want.parameters[ParameterConsistency] == consistencyFilesystem)
	if err != nil {
		return catalog.Group{}, err
	}
	group := catalog.Group{ID: handle.NewGroup(g.pool), Name: want.name, State: catalog.Creating, Parameters: want.parameters}
	var members []catalog.Snapshot
	for _, v := range held {
		member := snapshotOf(v)
		member.Group, member.Parameters = group.ID, want.parameters
		members, group.Members = append(members, member), append(group.Members, member.ID)
	}
	if err := g.catalog.Reserve(); err != nil {
		return group, err
	}
	if err := g.catalog.PutGroup(group, members); err != nil {
		return group, err
	}
	crashpoint.At(ctx, "group snapshot intended")
	noted := group
	noted.State, noted.Created = catalog.Ready, members[0].Created
	if err = g.cut(ctx, members, frozen, &noted); err == nil {
		group.State, group.Created = catalog.Ready, members[0].Created
		err = g.catalog.PutGroup(group, members)
	}
	if err != nil {
		undo, cancel := undoContext(ctx)
		defer cancel()
		return group, errors.Join(err, g.removeGroup(undo, group))
	}
	crashpoint.At(ctx, "group snapshot recorded")
	return group, nil
}

// holdAll holds volumes, all or none.
func (g *groupController) holdAll(ctx context.Context, ids []handle.Volume) (held []catalog.Volume, release func(), err error) {
	var releases []func()
	release = func() {
		for _, r := range releases {
			r()
		}
	}
	for _, id := range ids {
		v, r, err := g.hold(ctx, id)
		if err != nil {
			release()
			return nil, nil, err
		}
		releases, held = append(releases, r), append(held, v)
	}
	return held, release, nil
}

// planFreeze decides what has to be frozen so that the volumes are cut at one moment. A single writer needs no freeze: the
// others do not change, and its own volume is cut at one moment by itself.
func (g *groupController) planFreeze(ctx context.Context, held []catalog.Volume, always bool) ([]string, error) {
	for _, v := range held {
		if err := g.cuttable(ctx, v); err != nil {
			return nil, err
		}
	}
	sandboxed, restless, err := g.writers(ctx, held)
	if err != nil {
		return nil, err
	}
	switch {
	case !always && len(sandboxed)+len(restless) <= 1:
		return nil, nil
	case len(restless) > 0:
		return nil, precondition("the volumes cannot be cut at one moment: %s", strings.Join(restless, "; "))
	}
	return sandboxed, nil
}

// settleGroup removes a group snapshot that was being made or deleted; then it is ErrNotFound.
func (s *store) settleGroup(ctx context.Context, group catalog.Group) error {
	if group.State == catalog.Ready {
		return nil
	}
	if group.State == catalog.Creating {
		members, err := s.members(group)
		if err != nil {
			return err
		}
		for _, member := range members { // one by one: those that were not frozen must not keep the others
			s.quiet.release(ctx, []string{member.Volume.String()})
		}
	}
	if err := s.removeGroup(ctx, group); err != nil {
		return err
	}
	return fmt.Errorf("group snapshot %s: %w", group.ID, errdefs.ErrNotFound)
}

// removeGroup removes a group snapshot whose record says Creating or Deleting.
func (s *store) removeGroup(ctx context.Context, group catalog.Group) error {
	for _, member := range group.Members {
		if err := s.engine.Delete(ctx, object(member)); err != nil {
			return err
		}
		crashpoint.At(ctx, "data of a member deleted")
	}
	if err := s.catalog.RemoveGroup(group); err != nil {
		return err
	}
	crashpoint.At(ctx, "deletion recorded")
	return nil
}

// findGroup reads the ids of a request for a group snapshot that exists. If snapshot ids are given they must be those of
// its members (CSI, DeleteVolumeGroupSnapshot).
func (g *groupController) findGroup(text string, snapshotIDs []string) (catalog.Group, error) {
	id, err := handle.ParseGroup(text)
	if err != nil {
		return catalog.Group{}, err
	}
	if err := id.In(g.pool); err != nil {
		return catalog.Group{}, err
	}
	group, err := g.catalog.Group(id)
	if err != nil || len(snapshotIDs) == 0 {
		return group, err
	}
	var members []string
	for _, member := range group.Members {
		members = append(members, member.String())
	}
	slices.Sort(members)
	if !slices.Equal(members, slices.Sorted(slices.Values(snapshotIDs))) {
		return group, invalid("snapshot_ids: group snapshot %s has the snapshots %v", group.ID, members)
	}
	return group, nil
}

// DeleteVolumeGroupSnapshot removes a group snapshot with its members. What does not exist is success, with the same
// exception as in DeleteVolume.
func (g *groupController) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	if err := gone(g.deleteGroup(ctx, req)); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

func (g *groupController) deleteGroup(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) error {
	release, err := g.locks.try("group snapshot " + req.GetGroupSnapshotId())
	if err != nil {
		return err
	}
	defer release()
	group, err := g.findGroup(req.GetGroupSnapshotId(), req.GetSnapshotIds())
	if err != nil {
		return err
	}
	for _, member := range group.Members {
		release, err := g.locks.try("snapshot " + member.String())
		if err != nil {
			return err
		}
		defer release()
	}
	if group.State == catalog.Creating {
		return busy("group snapshot name " + group.Name)
	}
	members, err := g.members(group)
	if err != nil {
		return err
	}
	if group.State == catalog.Ready {
		for i := range members {
			members[i].State = catalog.Deleting
		}
		group.State = catalog.Deleting
		if err := g.catalog.PutGroup(group, members); err != nil {
			return err
		}
		crashpoint.At(ctx, "deletion intended")
	}
	return g.removeGroup(ctx, group)
}

// GetVolumeGroupSnapshot describes a group snapshot.
func (g *groupController) GetVolumeGroupSnapshot(_ context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	group, err := g.findGroup(req.GetGroupSnapshotId(), req.GetSnapshotIds())
	if err == nil && group.State != catalog.Ready {
		err = fmt.Errorf("group snapshot %s: %w", group.ID, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	described, err := g.describedGroup(group)
	if err != nil {
		return nil, err
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: described}, nil
}
