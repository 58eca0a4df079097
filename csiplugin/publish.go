package csiplugin

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/protocol/csi/deferred"
)

// publishRequest is a NodePublishVolumeRequest that says something sensible.
type publishRequest struct {
	volume          string
	staging, target string
	capability      capability
	readOnly        bool
	deferred        bool
	context         map[string]string
}

// parsePublish reads a NodePublishVolumeRequest. Errors are ErrInvalidArgument, but ErrFailedPrecondition for a missing
// staging_target_path (CSI, NodePublishVolume Errors), and show neither secrets nor mount flags.
func parsePublish(req *csi.NodePublishVolumeRequest) (publishRequest, error) {
	r := publishRequest{volume: req.GetVolumeId(), context: req.GetVolumeContext()}
	var ext deferred.NodePublishVolumeRequestExtension
	if err := deferred.Get(req, &ext); err != nil {
		return r, err
	}
	r.deferred = ext.GetDeferFsOps()
	if r.volume == "" {
		return r, invalid("volume_id is missing")
	}
	var err error
	if r.target, err = parsePath("target_path", req.GetTargetPath()); err != nil {
		return r, err
	}
	if r.capability, err = parseCapability(req.GetVolumeCapability()); err != nil {
		return r, err
	}
	r.readOnly = req.GetReadonly() || r.capability.readOnly
	switch {
	case r.deferred && r.capability.use.Block:
		return r, invalid("defer_fs_ops: a block device has no filesystem to defer; publish it without")
	case !r.deferred && r.capability.sandboxed:
		return r, invalid("volume_supplemental_group and its change policy are for defer_fs_ops; on the host there is volume_mount_group")
	case req.GetStagingTargetPath() == "":
		return r, precondition("staging_target_path is missing; this driver has STAGE_UNSTAGE_VOLUME")
	}
	if r.staging, err = parsePath("staging_target_path", req.GetStagingTargetPath()); err != nil {
		return r, err
	}
	if r.staging == r.target {
		return r, invalid("staging_target_path and target_path are both %s", r.target)
	}
	return r, nil
}

// NodePublishVolume makes a volume available at a target: as a mount or a block device on the host, or, with
// defer_fs_ops, by answering what has to be attached to a sandbox. In the latter case nothing is mounted, and the target
// is the CO's to make. The same call again is success; a publish that fails leaves nothing behind.
func (n *node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	r, err := parsePublish(req)
	if err != nil {
		return nil, err
	}
	v, state, release, err := n.visit(ctx, r.volume)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := checkContext(v, r.context); err != nil {
		return nil, err
	}
	if r.capability, err = r.capability.of(v); err != nil {
		return nil, precondition("%v", err)
	}
	want := r.record(n.boot)
	want.Discard = v.Mutable[ParameterDiscard] == discardOnline
	if err := planPublish(v, state, want); err != nil {
		return nil, err
	}
	if want.Kind != catalog.Deferred {
		return &csi.NodePublishVolumeResponse{}, n.publishHost(ctx, v, state, want, mountFlags(want, r.capability.flags))
	}
	fs, err := n.publishDeferred(ctx, v, state, want, r.capability.flags)
	if err != nil {
		return nil, err
	}
	resp := &csi.NodePublishVolumeResponse{}
	return resp, deferred.Set(resp, &deferred.NodePublishVolumeResponseExtension{DeferredFilesystem: fs})
}

// record is the publish as the catalog will have it.
func (r publishRequest) record(boot string) catalog.Publish {
	p := catalog.Publish{
		Target: r.target, Staging: r.staging, Kind: catalog.Mount, State: catalog.Published, Use: r.capability.use,
		ReadOnly: r.readOnly, Group: r.capability.group, Policy: r.capability.policy, Boot: boot,
	}
	switch {
	case r.deferred:
		p.Kind = catalog.Deferred
	case r.capability.use.Block:
		p.Kind = catalog.Block
	}
	return p
}

// planPublish reports whether a volume can be published as wanted, given what this node does with it already. The same
// request again can.
func planPublish(v catalog.Volume, have catalog.Node, want catalog.Publish) error {
	if err := planDefer(v, want); err != nil {
		return err
	}
	switch staged := have.Staged; {
	case staged == nil:
		return precondition("volume %s is not staged; stage it first", v.ID)
	case staged.Path != want.Staging:
		return precondition("volume %s is staged at %s, not at %s", v.ID, staged.Path, want.Staging)
	case staged.Use != want.Use:
		return precondition("volume %s is staged with another volume_capability; unstage it first", v.ID)
	}
	if old, there := have.Publishes[want.Target]; there && old.Boot == want.Boot {
		if !old.Same(want) {
			return alreadyExists("volume %s is published at %s in another way; unpublish it first", v.ID, want.Target)
		}
		return nil
	}
	for _, other := range have.Publishes {
		if other.Boot != want.Boot {
			continue // it ended with the boot that it was made in
		}
		if err := planBeside(other, want); err != nil {
			return precondition("volume %s is published at %s%v", v.ID, other.Target, err)
		}
	}
	return nil
}

// planDefer holds a publish against what the volume's creator wanted, so that nothing that was to be kept from the host's
// kernel is ever mounted there.
func planDefer(v catalog.Volume, want catalog.Publish) error {
	switch parameter := v.Parameters[deferred.ParameterDefer]; {
	case parameter == deferAlways && want.Kind == catalog.Mount:
		return precondition("volume %s was created with %s=%s and is never mounted on the host; publish it through the node daemon to a runtime with sandboxes",
			v.ID, deferred.ParameterDefer, parameter)
	case parameter == deferNever && want.Kind == catalog.Deferred:
		return precondition("volume %s was created with %s=%s; publish it without defer_fs_ops", v.ID, deferred.ParameterDefer, parameter)
	}
	return nil
}

// planBeside reports whether a volume can be published as wanted beside another publish, which has the same
// volume_capability, since both have that of the stage. The error goes on from "is published at <target>" and has no kind.
func planBeside(other, want catalog.Publish) error {
	switch {
	case (other.Kind == catalog.Deferred) != (want.Kind == catalog.Deferred):
		return fmt.Errorf(" %s and cannot be published %s too; unpublish it there first", described(other), described(want))
	case want.Kind == catalog.Deferred && !(other.ReadOnly && want.ReadOnly):
		return fmt.Errorf(" to another sandbox, and one sandbox can write to it or several can read; unpublish it there first")
	case !sharable(want):
		return fmt.Errorf(" and access mode %s allows one target only; unpublish it there first", csi.VolumeCapability_AccessMode_Mode(want.Use.Mode))
	}
	return nil
}

func described(p catalog.Publish) string {
	if p.Kind == catalog.Deferred {
		return "to a sandbox"
	}
	return "on the host"
}

// putPublish records a publish. Whatever the volume holds from now on is this one's: no other may have it erased.
func (n *node) putPublish(v catalog.Volume, state *catalog.Node, p catalog.Publish) error {
	for target, other := range state.Publishes {
		other.NeverWritten = false
		state.Publishes[target] = other
	}
	if state.Publishes == nil {
		state.Publishes = map[string]catalog.Publish{}
	}
	state.Publishes[p.Target] = p
	state.Staged.Boot = n.boot
	return n.catalog.PutNode(v.ID, *state)
}

// free reports whether nobody uses a volume whom the catalog does not know: a mount that somebody has made by hand, a
// sandbox that was given up. Where there are other publishes, [planPublish] has looked at them.
func (n *node) free(ctx context.Context, v catalog.Volume, state catalog.Node) error {
	if len(n.liveTargets(state)) > 0 {
		return nil
	}
	devices, err := loopdev.Find(n.path(v))
	if err != nil {
		return err
	}
	for _, d := range devices {
		if !d.Passing {
			return precondition("volume %s is attached to %s, and this plugin knows of no publish that needs it; detach it there", v.ID, d.Path)
		}
	}
	// The passing device of a process that was killed is about to go, unless it is mounted somewhere.
	if err := loopdev.Detach(ctx, n.path(v)); err != nil {
		return err
	}
	return n.engine.Idle(ctx, object(v.ID))
}
