package proxy

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc"
)

// NodeStageVolume is that of CSI. It goes through, unless it would end in a host mount of a volume that is to be
// deferred: a driver that knows the extension does not mount before it is asked to publish.
func (n *node) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	deferral, err := n.policy.AtStage(req.GetVolumeContext(), req.GetVolumeCapability())
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", req.GetVolumeId(), err)
	}
	if deferral {
		if _, err := n.provider.RequireDeferral(ctx); err != nil {
			return nil, fmt.Errorf("volume %s: %w", req.GetVolumeId(), err)
		}
	}
	resp, err := n.provider.Node().NodeStageVolume(ctx, req)
	return resp, rpc.Relay(err)
}

// NodeUnstageVolume is that of CSI. The kubelet calls it as soon as it sees no mount any more, which for a deferral is
// always: so it is refused here while a deferral of the volume is left.
func (n *node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	driver, err := n.provider.Name(ctx)
	if err != nil {
		return nil, err
	}
	if left := n.deferrals.OfVolume(driver, req.GetVolumeId()); len(left) > 0 {
		return nil, fmt.Errorf("volume %s is still published at %s; unpublish it first: %w", req.GetVolumeId(), left[0].Deferral.TargetPath, errdefs.ErrFailedPrecondition)
	}
	resp, err := n.provider.Node().NodeUnstageVolume(ctx, req)
	return resp, rpc.Relay(err)
}

// NodeGetCapabilities is that of CSI. What the driver has declared for the daemon's eyes is left out.
func (n *node) NodeGetCapabilities(ctx context.Context, req *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp, err := n.provider.Node().NodeGetCapabilities(ctx, req)
	if err != nil {
		return nil, rpc.Relay(err)
	}
	resp.Capabilities = slices.DeleteFunc(resp.GetCapabilities(), func(c *csi.NodeServiceCapability) bool {
		switch c.GetRpc().GetType() {
		case deferred.CapabilityDeferFSOps, deferred.CapabilitySupplementalGroup, deferred.CapabilitySupplementalGroupChangePolicy:
			return true
		}
		return false
	})
	return resp, nil
}
