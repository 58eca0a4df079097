package csiplugin

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// NodeStageVolume checks that a volume can be used as described here, and notes it. It mounts nothing: whether the volume
// will be deferred is not known before it is published.
func (n *node) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	path, err := parsePath("staging_target_path", req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	asked, err := parseCapability(req.GetVolumeCapability())
	if err != nil {
		return nil, err
	}
	v, state, release, err := n.visit(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	if err := checkContext(v, req.GetVolumeContext()); err != nil {
		return nil, err
	}
	if asked, err = asked.of(v); err != nil {
		return nil, precondition("%v", err)
	}
	if err := checkStaging(path); err != nil {
		return nil, err
	}
	staged := catalog.Stage{Path: path, Use: asked.use, Boot: n.boot}
	if err := planStage(state.Staged, staged); err != nil {
		return nil, err
	}
	if _, err := n.stat(ctx, v); err != nil {
		return nil, err
	}
	if state.Staged == nil || *state.Staged != staged {
		if err := n.catalog.Reserve(); err != nil {
			return nil, err
		}
		state.Staged = &staged
		if err := n.catalog.PutNode(v.ID, state); err != nil {
			return nil, err
		}
		crashpoint.At(ctx, "stage recorded")
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// checkStaging looks for the directory that the CO has to make.
func checkStaging(path string) error {
	info, err := os.Lstat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return precondition("staging_target_path: %v", err)
	}
	if err != nil || !info.IsDir() {
		return precondition("staging_target_path %s is not a directory; making it is the CO's part", path)
	}
	return nil
}

// planStage reports whether a volume can be staged, given how it is staged already. What an earlier boot has staged is
// staged no more; a publish renews it.
func planStage(old *catalog.Stage, want catalog.Stage) error {
	switch {
	case old == nil || old.Boot != want.Boot:
		return nil
	case old.Path != want.Path:
		return precondition("the volume is staged at %s; unstage it there first", old.Path)
	case old.Use != want.Use:
		return alreadyExists("the volume is staged at %s with another volume_capability", old.Path)
	}
	return nil
}

// NodeUnstageVolume forgets that a volume is staged, and takes down what is left of host mounts. A volume that is
// published is ErrFailedPrecondition.
func (n *node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	path, err := parsePath("staging_target_path", req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	v, state, release, err := n.visit(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	if state.Staged != nil && state.Staged.Path != path {
		return &csi.NodeUnstageVolumeResponse{}, nil // it is not staged there (CSI, NodeUnstageVolume)
	}
	if targets := n.liveTargets(state); len(targets) > 0 {
		return nil, precondition("volume %s is published at %s; unpublish it first", v.ID, strings.Join(targets, ", "))
	}
	if err := n.clearStaging(ctx, v, path); err != nil {
		return nil, err
	}
	crashpoint.At(ctx, "staging path cleared")
	if state.Staged != nil {
		state.Staged, state.Publishes = nil, nil
		if err := n.catalog.PutNode(v.ID, state); err != nil {
			return nil, err
		}
		crashpoint.At(ctx, "unstage recorded")
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}
