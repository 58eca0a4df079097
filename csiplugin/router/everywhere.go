package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/routing"
	"crust.dev/crust/protocol/rpc"
)

// parallel is how many nodes are told something at the same time.
const parallel = 32

// deleteEverywhere has every node delete an image that belongs to no pool. A node deletes what it has made on demand for exactly this
// handle, and nothing that the operator or a snapshot has made; where there is nothing, that is success, so all of it can be repeated.
//
// The image is gone when all nodes have said so. As long as one has not, be it away or without an answer, it may still have the image,
// which nobody would ask for any more: that is ErrUnavailable. What a node refuses is the call's error.
func deleteEverywhere(ctx context.Context, r *Router, req *csi.DeleteSnapshotRequest, h backing.Handle) (*csi.DeleteSnapshotResponse, error) {
	places, err := r.pools.all(ctx)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var refused error
	var silent []string
	tell := errgroup.Group{}
	tell.SetLimit(parallel)
	for pool, at := range places {
		tell.Go(func() error {
			answered, err := deleteAt(ctx, r, pool, at, req)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil && answered:
				refused = errors.Join(refused, err)
			case err != nil:
				silent = append(silent, strings.TrimSuffix(err.Error(), ": "+errdefs.ErrUnavailable.Error())) // said once, at the end
			}
			return nil
		})
	}
	_ = tell.Wait() // errors are in the variables: nobody is left out because another one fails
	switch {
	case len(silent) > 0 && ctx.Err() != nil:
		return nil, fmt.Errorf("image %q may still be on some of %d nodes: %w", h.Image, len(places), ctx.Err())
	case len(silent) > 0:
		slices.Sort(silent)
		return nil, fmt.Errorf("image %q may still be on %d of %d nodes; bring them back, or delete the Node objects of those that are gone for good: %s: %w",
			h.Image, len(silent), len(places), strings.Join(silent, "; "), errdefs.ErrUnavailable)
	case refused != nil:
		return nil, refused
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// deleteAt has one node delete, and says whether it has answered. An answer that has it asked again counts as none.
func deleteAt(ctx context.Context, r *Router, pool handle.Pool, at place, req *csi.DeleteSnapshotRequest) (answered bool, err error) {
	l, err := r.dial(pool, at)
	if err != nil {
		return false, err
	}
	var trailer metadata.MD
	_, err = csi.NewControllerClient(l.conn).DeleteSnapshot(ctx, req, grpc.Trailer(&trailer))
	if !routing.Answered(trailer) {
		return false, l.fault(ctx, err, trailer)
	}
	if err != nil {
		err = fmt.Errorf("node %s with pool %s: %w", at.node, pool, rpc.FromWire(err))
	}
	return !errors.Is(err, errdefs.ErrUnavailable), err
}
