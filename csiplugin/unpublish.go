package csiplugin

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// NodeUnpublishVolume takes a volume back from a target, and is success if it is not published there.
//
// For a deferred publish, whether or not the CO says that it was one, the sandbox must have let go of the volume: while
// anybody has it open it is ErrFailedPrecondition. The target stays as it is. If the CO is certain that nobody has mounted the volume
// (never_mounted), and it was blank when this publish began, it is made blank again.
func (n *node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	var ext deferred.NodeUnpublishVolumeRequestExtension
	if err := deferred.Get(req, &ext); err != nil {
		return nil, err
	}
	if req.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	target, err := parsePath("target_path", req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	if ext.GetNeverMounted() && !ext.GetDeferFsOps() {
		return nil, invalid("never_mounted is for defer_fs_ops")
	}
	v, state, release, err := n.visit(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	p, there := state.Publishes[target]
	switch {
	case !there:
		err = n.clearUnrecorded(ctx, v, target)
	case p.Kind == catalog.Deferred:
		err = n.unpublishDeferred(ctx, v, state, p, ext.GetNeverMounted())
	case ext.GetDeferFsOps():
		err = precondition("volume %s is published at %s on the host; unpublish it without defer_fs_ops", v.ID, target)
	default:
		err = n.unpublish(ctx, v, state, p)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (n *node) unpublishDeferred(ctx context.Context, v catalog.Volume, state catalog.Node, p catalog.Publish, neverMounted bool) error {
	// Of several sandboxes that read a volume, each but the last finds it open when it goes.
	if !n.besides(state, p) {
		if err := n.engine.Idle(ctx, object(v.ID)); err != nil {
			return err
		}
	}
	p.Erase = neverMounted && p.NeverWritten
	return n.unpublish(ctx, v, state, p)
}

// besides reports whether a volume is published at other targets too.
func (n *node) besides(state catalog.Node, p catalog.Publish) bool {
	return slices.ContainsFunc(n.liveTargets(state), func(target string) bool { return target != p.Target })
}

// unpublish notes that a publish is to end, and ends it.
func (n *node) unpublish(ctx context.Context, v catalog.Volume, state catalog.Node, p catalog.Publish) error {
	p.State = catalog.Unpublishing
	state.Publishes[p.Target] = p
	if err := n.catalog.PutNode(v.ID, state); err != nil {
		return err
	}
	crashpoint.At(ctx, "unpublish intended")
	return n.takeDown(ctx, v, &state, p)
}

// clearUnrecorded unmounts a target where the volume is mounted although no record says so, as after the catalog was
// restored from a copy. Without a mount of the volume there the target is not touched.
func (n *node) clearUnrecorded(ctx context.Context, v catalog.Volume, target string) error {
	ours, err := n.ours(v)
	if err != nil {
		return err
	}
	m, err := hostmount.At(target)
	if err != nil || m == nil || !ours(m) {
		return err
	}
	if err := hostmount.Clear(ctx, target, ours); err != nil {
		return err
	}
	return hostmount.RemoveTarget(target)
}
