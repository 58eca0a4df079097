package router

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/handle"
)

// groupController is the GroupController service.
type groupController struct {
	csi.UnimplementedGroupControllerServer
	*Router
}

func (g *groupController) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
		}},
	}}}, nil
}

// CreateVolumeGroupSnapshot is passed on to the node that has the pool of all the volumes.
func (g *groupController) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	var volumes []handle.Volume
	for _, text := range req.GetSourceVolumeIds() {
		if text == "" {
			return nil, fmt.Errorf("source_volume_ids has an empty entry: %w", errdefs.ErrInvalidArgument)
		}
		id, err := handle.ParseVolume(text)
		if err != nil {
			return nil, err
		}
		volumes = append(volumes, id)
	}
	if len(volumes) == 0 {
		return nil, fmt.Errorf("source_volume_ids is missing: %w", errdefs.ErrInvalidArgument)
	}
	pool, err := handle.OnePool(volumes)
	if err != nil {
		return nil, err
	}
	return forward(ctx, g.Router, pool, req, csi.NewGroupControllerClient, csi.GroupControllerClient.CreateVolumeGroupSnapshot)
}

// DeleteVolumeGroupSnapshot is passed on. What cannot be an id of this driver's does not exist, which is success (CSI,
// DeleteVolumeGroupSnapshot).
func (g *groupController) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	id, err := handle.ParseGroup(req.GetGroupSnapshotId())
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	case err != nil:
		return nil, err
	}
	return forward(ctx, g.Router, id.Pool(), req, csi.NewGroupControllerClient, csi.GroupControllerClient.DeleteVolumeGroupSnapshot)
}

func (g *groupController) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	id, err := handle.ParseGroup(req.GetGroupSnapshotId())
	if err != nil {
		return nil, err
	}
	return forward(ctx, g.Router, id.Pool(), req, csi.NewGroupControllerClient, csi.GroupControllerClient.GetVolumeGroupSnapshot)
}
