package router

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/handle"
)

// snapshotID is what the id of a snapshot says.
type snapshotID struct {
	// pool is the one that has what the id stands for. It is empty if the id does not say; then it is the handle of an image that
	// every pool may have, or none.
	pool  handle.Pool
	image backing.Handle
}

// parseSnapshot reads the id of a snapshot, or the handle of a backing image. Errors are those of [handle.ParseSnapshot] and of
// [backing.ParseHandle].
//
// The handles of images that CreateSnapshot has made have the image's own id in them, and so a pool. An image that is exported on
// demand is made in the pool of its volume, if the handle has the volume by its id. One that is downloaded is made by each node that a
// volume is wanted on, and so belongs to no pool; and where a volume is that is called by its name, nobody knows but its node.
func parseSnapshot(text string) (snapshotID, error) {
	if !backing.IsHandle(text) {
		id, err := handle.ParseSnapshot(text)
		return snapshotID{pool: id.Pool()}, err
	}
	h, err := backing.ParseHandle(text)
	if err != nil {
		return snapshotID{}, err
	}
	id := snapshotID{image: h}
	if img, err := handle.ParseImage(h.ID); err == nil {
		id.pool = img.Pool()
	} else if v, err := handle.ParseVolume(h.Volume); err == nil {
		id.pool = v.Pool()
	}
	return id, nil
}

// anywhere describes an image that belongs to no pool, from its handle alone. If that says all that it takes to make the image, every
// node answers that it is ready, whether or not it has made it yet: whoever waits for it would never use it. So nobody is asked, and
// the answer is that of a node that has not, whichever node a volume will be made on. If the handle only refers to an image, it is
// ready on a node that has one of the name, and does not exist on another: ErrInvalidArgument, with what the handle lacks.
func anywhere(text string, h backing.Handle) (*csi.Snapshot, error) {
	if h.Preparable() != nil {
		return nil, fmt.Errorf("the handle of image %q says neither which pool has the image nor all that it takes to make it, so no node can be asked; add url, or volume-name and export-type, with which any node makes it when a volume is wanted; or image-id, which crustctl images -o json shows on the node that has it: %w",
			h.Image, errdefs.ErrInvalidArgument)
	}
	return &csi.Snapshot{SnapshotId: text, SourceVolumeId: h.Volume, ReadyToUse: true, CreationTime: timestamppb.New(time.Unix(0, 0))}, nil
}

func (c *controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if req.GetSourceVolumeId() == "" {
		return nil, fmt.Errorf("source_volume_id is missing: %w", errdefs.ErrInvalidArgument)
	}
	volume, err := handle.ParseVolume(req.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	return forward(ctx, c.Router, volume.Pool(), req, csi.NewControllerClient, csi.ControllerClient.CreateSnapshot)
}

// DeleteSnapshot is passed on to the node that has the snapshot. An image that belongs to no pool may have been made on demand by
// several nodes, so all are told. What cannot be an id of this driver's does not exist, which is success (CSI, DeleteSnapshot).
func (c *controller) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if err := backing.ForeignScheme(req.GetSnapshotId()); err != nil {
		return nil, err
	}
	id, err := parseSnapshot(req.GetSnapshotId())
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		return &csi.DeleteSnapshotResponse{}, nil
	case err != nil:
		return nil, err
	case id.pool == "":
		return deleteEverywhere(ctx, c.Router, req, id.image)
	}
	return forward(ctx, c.Router, id.pool, req, csi.NewControllerClient, csi.ControllerClient.DeleteSnapshot)
}

func (c *controller) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	id, err := parseSnapshot(req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	if id.pool == "" {
		snap, err := anywhere(req.GetSnapshotId(), id.image)
		if err != nil {
			return nil, err
		}
		return &csi.GetSnapshotResponse{Snapshot: snap}, nil
	}
	return forward(ctx, c.Router, id.pool, req, csi.NewControllerClient, csi.ControllerClient.GetSnapshot)
}

// ListSnapshots is passed on if there is an id in it, which is how csi-snapshotter asks for one snapshot. A list of all pools would need
// all nodes, and tokens that hold while nodes come and go: it is ErrNotImplemented. Ids that cannot be this driver's match nothing.
func (c *controller) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	pool := handle.Pool("")
	switch snapshot, volume := req.GetSnapshotId(), req.GetSourceVolumeId(); {
	case snapshot == "" && volume == "":
		return nil, fmt.Errorf("ListSnapshots of all pools is not served by the router: %s; give snapshot_id or source_volume_id: %w", ofItsPool, errdefs.ErrNotImplemented)
	case snapshot == "":
		id, err := handle.ParseVolume(volume)
		if err != nil {
			return page(req)
		}
		pool = id.Pool()
	default:
		id, err := parseSnapshot(snapshot)
		switch {
		case errors.Is(err, errdefs.ErrNotFound):
			return page(req)
		case err != nil:
			return nil, err
		case id.pool == "":
			return listAnywhere(req, id.image)
		}
		pool = id.pool
	}
	return forward(ctx, c.Router, pool, req, csi.NewControllerClient, csi.ControllerClient.ListSnapshots)
}

// listAnywhere is ListSnapshots for the handle of an image that belongs to no pool.
func listAnywhere(req *csi.ListSnapshotsRequest, h backing.Handle) (*csi.ListSnapshotsResponse, error) {
	snap, err := anywhere(req.GetSnapshotId(), h)
	if err != nil {
		return nil, err
	}
	if volume := req.GetSourceVolumeId(); volume != "" && volume != snap.GetSourceVolumeId() {
		return page(req)
	}
	return page(req, snap)
}

// page is a list that no node was asked for. It has no next page, so nobody was given a token for one (CSI, ListSnapshots Errors).
func page(req *csi.ListSnapshotsRequest, snaps ...*csi.Snapshot) (*csi.ListSnapshotsResponse, error) {
	switch {
	case req.GetMaxEntries() < 0:
		return nil, fmt.Errorf("max_entries is %d: %w", req.GetMaxEntries(), errdefs.ErrInvalidArgument)
	case req.GetStartingToken() != "":
		return nil, fmt.Errorf("starting_token %.64q is none of this list's; begin again without: %w", req.GetStartingToken(), errdefs.ErrAborted)
	}
	resp := &csi.ListSnapshotsResponse{}
	for _, snap := range snaps {
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snap})
	}
	return resp, nil
}
