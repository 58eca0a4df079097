package router

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"crust.dev/crust/csiplugin/handle"
)

// snapshotMetadata is the SnapshotMetadata service.
type snapshotMetadata struct {
	csi.UnimplementedSnapshotMetadataServer
	*Router
}

func (m *snapshotMetadata) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, down csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	id, err := handle.ParseSnapshot(req.GetSnapshotId())
	if err != nil {
		return err
	}
	return pass(m.Router, id.Pool(), req, down, csi.SnapshotMetadataClient.GetMetadataAllocated)
}

func (m *snapshotMetadata) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, down csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	if req.GetBaseSnapshotId() == "" || req.GetTargetSnapshotId() == "" {
		return fmt.Errorf("base_snapshot_id %.64q, target_snapshot_id %.64q: both are needed: %w", req.GetBaseSnapshotId(), req.GetTargetSnapshotId(), errdefs.ErrInvalidArgument)
	}
	base, err := handle.ParseSnapshot(req.GetBaseSnapshotId())
	if err != nil {
		return err
	}
	target, err := handle.ParseSnapshot(req.GetTargetSnapshotId())
	if err != nil {
		return err
	}
	if base.Pool() != target.Pool() {
		return fmt.Errorf("snapshot %s is in pool %s and snapshot %s in pool %s; only snapshots of one volume can be compared: %w", base, base.Pool(), target, target.Pool(), errdefs.ErrInvalidArgument)
	}
	return pass(m.Router, target.Pool(), req, down, csi.SnapshotMetadataClient.GetMetadataDelta)
}

// source is a stream from a node, and sink one to our caller.
type source[M any] interface {
	Recv() (*M, error)
	grpc.ClientStream
}

type sink[M any] interface {
	Send(*M) error
	grpc.ServerStream
}

// pass opens a stream of the node that has a pool, and passes its messages on one by one: a caller that does not read makes the
// node wait, and one that goes away ends the node's call.
func pass[Req, M any, S source[M]](r *Router, pool handle.Pool, req Req, down sink[M],
	method func(csi.SnapshotMetadataClient, context.Context, Req, ...grpc.CallOption) (S, error)) error {
	ctx, cancel := context.WithCancel(down.Context())
	defer cancel()
	l, err := r.link(ctx, pool)
	if err != nil {
		return err
	}
	up, err := method(csi.NewSnapshotMetadataClient(l.conn), ctx, req)
	if err != nil {
		return l.fault(ctx, err, nil)
	}
	for {
		m, err := up.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return l.fault(ctx, err, up.Trailer())
		}
		if err := down.Send(m); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("the stream broke: %v: %w", err, errdefs.ErrUnavailable)
		}
	}
}
