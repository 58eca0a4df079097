package csiplugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
)

// pageRequest is where a page begins and how many entries it may have; 0 is all.
type pageRequest struct {
	after string
	limit int
}

// parsePage reads max_entries and starting_token. The token is the handle of the last entry of the page before: it stays
// good when that, or anything else, is deleted. Any other is ErrAborted (CSI, ListVolumes Errors).
func (s *store) parsePage(kind handle.Kind, maxEntries int32, token string) (pageRequest, error) {
	if maxEntries < 0 {
		return pageRequest{}, invalid("max_entries is %d", maxEntries)
	}
	if token != "" {
		h, err := handle.Parse(token)
		if err != nil || h.Kind() != kind || h.In(s.pool) != nil {
			return pageRequest{}, fmt.Errorf("starting_token %.64q is none of this pool; begin again without: %w", token, errdefs.ErrAborted)
		}
	}
	return pageRequest{after: token, limit: int(maxEntries)}, nil
}

// ask is how many entries have to be looked for to fill the page and to know whether there are more.
func (p pageRequest) ask() int {
	if p.limit == 0 {
		return 0
	}
	return p.limit + 1
}

// cutPage returns the entries of a page, and the token of the next if there is one.
func cutPage[R any](p pageRequest, found []R, id func(R) string) (entries []R, next string) {
	if p.limit == 0 || len(found) <= p.limit {
		return found, ""
	}
	return found[:p.limit], id(found[p.limit-1])
}

// ListVolumes lists the volumes in the order of their handles.
func (c *controller) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	page, err := c.parsePage(handle.KindVolume, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	found, err := c.catalog.VolumesAfter(page.after, func(v catalog.Volume) bool { return v.State == catalog.Ready }, page.ask())
	if err != nil {
		return nil, err
	}
	entries, next := cutPage(page, found, func(v catalog.Volume) string { return v.ID.String() })
	resp := &csi.ListVolumesResponse{NextToken: next}
	for _, v := range entries {
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: c.described(v)})
	}
	return resp, nil
}

// ListSnapshots lists the snapshots that were cut, those of groups too, in the order of their handles. Ids that are none
// of this pool's match nothing.
func (c *controller) ListSnapshots(_ context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	kind := handle.KindSnapshot
	if h, err := handle.Parse(req.GetStartingToken()); err == nil && h.Kind() == handle.KindImage {
		kind = handle.KindImage
	}
	page, err := c.parsePage(kind, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	if backing.IsHandle(req.GetSnapshotId()) {
		return c.listImage(req)
	}
	matches := func(s catalog.Snapshot) bool {
		return s.State == catalog.Ready &&
			(req.GetSnapshotId() == "" || s.ID.String() == req.GetSnapshotId()) &&
			(req.GetSourceVolumeId() == "" || s.Volume.String() == req.GetSourceVolumeId())
	}
	var found []listed
	if req.GetSnapshotId() == "" {
		if found, err = c.imagesAfter(page, req.GetSourceVolumeId()); err != nil {
			return nil, err
		}
	}
	ordinary, err := c.catalog.SnapshotsAfter(page.after, matches, page.ask())
	if err != nil {
		return nil, err
	}
	for _, s := range ordinary {
		found = append(found, listed{s.ID.Handle, c.describedSnapshot(s)})
	}
	entries, next := cutPage(page, found, func(l listed) string { return l.key.String() })
	resp := &csi.ListSnapshotsResponse{NextToken: next}
	for _, l := range entries {
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: l.snap})
	}
	return resp, nil
}

// ControllerGetVolume describes a volume. Its status is empty: volumes are not published by the controller.
func (c *controller) ControllerGetVolume(_ context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	v, _, err := c.look(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{Volume: c.described(v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}

// ControllerGetVolumeHealth reports what NodeGetVolumeHealth reports: the controller of a pool is on the pool's node.
func (c *controller) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	v, state, err := c.look(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: c.volumeHealth(ctx, v, state)}, nil
}

// ControllerListVolumeHealth lists the volumes that something is wrong with.
func (c *controller) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	page, err := c.parsePage(handle.KindVolume, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	all, err := c.catalog.VolumesAfter(page.after, func(v catalog.Volume) bool { return v.State == catalog.Ready }, 0)
	if err != nil {
		return nil, err
	}
	var found []*csi.VolumeHealth
	for _, v := range all {
		state, err := c.catalog.Node(v.ID)
		if err := errors.Join(err, ctx.Err()); err != nil {
			return nil, err
		}
		if health := c.volumeHealth(ctx, v, state); len(health.GetHealthStatuses()) > 0 {
			found = append(found, health)
		}
		if page.limit > 0 && len(found) > page.limit {
			break
		}
	}
	entries, next := cutPage(page, found, func(h *csi.VolumeHealth) string { return h.GetVolumeId() })
	return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}, nil
}
