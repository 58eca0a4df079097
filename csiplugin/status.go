package csiplugin

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

// status is the Pool service. It takes no locks: what it tells is of the moment.
type status struct {
	poolv1.UnsafePoolServer
	*store
	driver, directory string
}

// GetStatus is that of the API.
func (s *status) GetStatus(ctx context.Context, _ *poolv1.GetStatusRequest) (*poolv1.GetStatusResponse, error) {
	space, err := s.engine.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	volumes, volumesErr := s.catalog.Volumes()
	snapshots, snapshotsErr := s.catalog.SnapshotsAfter("", nil, 0)
	groups, groupsErr := s.catalog.Groups()
	if err := errors.Join(volumesErr, snapshotsErr, groupsErr); err != nil {
		return nil, err
	}
	resp := &poolv1.GetStatusResponse{
		Driver: s.driver, Pool: string(s.pool), Directory: s.directory, TotalBytes: space.Total, FreeBytes: space.Free,
		Volumes: int64(len(volumes)), Snapshots: int64(len(snapshots)), Groups: int64(len(groups)), CanFreeze: s.quiet.client != nil,
	}
	for _, v := range volumes {
		resp.PromisedBytes += v.Size
	}
	return resp, nil
}

// ListObjects is that of the API.
func (s *status) ListObjects(ctx context.Context, req *poolv1.ListObjectsRequest) (*poolv1.ListObjectsResponse, error) {
	volumes, volumesErr := s.catalog.Volumes()
	snapshots, snapshotsErr := s.catalog.SnapshotsAfter("", nil, 0)
	if err := errors.Join(volumesErr, snapshotsErr); err != nil {
		return nil, err
	}
	var objects []*poolv1.Object
	made := map[string][]string{}
	note := func(source, id string) {
		if source != "" {
			made[source] = append(made[source], id)
		}
	}
	for _, v := range volumes {
		n, err := s.catalog.Node(v.ID)
		if err != nil {
			return nil, err
		}
		o := &poolv1.Object{
			Id: v.ID.String(), Name: v.Name, State: string(v.State), SizeBytes: v.Size, FsType: v.FSType,
			Source: v.Source, Targets: s.liveTargets(n), Created: timestamppb.New(v.Created),
		}
		_, err = s.stat(ctx, v)
		objects = append(objects, lost(o, err))
		note(v.Source, o.GetId())
	}
	for _, snap := range snapshots {
		o := &poolv1.Object{
			Id: snap.ID.String(), Name: snap.Name, Snapshot: true, State: string(snap.State), SizeBytes: snap.Size, FsType: snap.FSType,
			Source: snap.Volume.String(), Created: timestamppb.New(snap.Created),
		}
		if snap.Group != (handle.Group{}) {
			o.Group = snap.Group.String()
		}
		_, err := s.statSnapshot(ctx, snap)
		objects = append(objects, lost(o, err))
		note(o.GetSource(), o.GetId())
	}
	for _, o := range objects {
		o.MadeFromIt = made[o.GetId()]
		if err := s.measure(ctx, o, req.GetExtents()); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(objects, func(a, b *poolv1.Object) int { return cmp.Compare(a.GetId(), b.GetId()) })
	return &poolv1.ListObjectsResponse{Objects: objects}, nil
}

// lost notes that an object's data is not what it should be.
func lost(o *poolv1.Object, err error) *poolv1.Object {
	if err != nil && o.GetState() == string(catalog.Ready) {
		o.State = "lost"
	}
	return o
}

// measure fills in what an object takes. One that is not there, or not any more, takes nothing.
func (s *status) measure(ctx context.Context, o *poolv1.Object, extents bool) error {
	name := engine.Name(o.GetId())
	st, err := s.engine.Stat(ctx, name)
	if err == nil && extents {
		var x engine.Extents
		if x, err = s.engine.Extents(ctx, name); err == nil {
			o.SharedBytes, o.Extents = x.Shared, x.Count
		}
	}
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	o.AllocatedBytes = st.Allocated
	return err
}
