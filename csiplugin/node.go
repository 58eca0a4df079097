package csiplugin

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/protocol/csi/deferred"
)

// node is the Node service.
type node struct {
	csi.UnimplementedNodeServer
	*store
	id string
}

// NodeGetCapabilities declares the capabilities of the extension to those only who ask for them (deferred.Ask).
func (n *node) NodeGetCapabilities(ctx context.Context, _ *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	types := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	}
	if deferred.Asked(ctx) {
		types = append(types, deferred.CapabilityDeferFSOps, deferred.CapabilitySupplementalGroup, deferred.CapabilitySupplementalGroupChangePolicy)
	}
	var caps []*csi.NodeServiceCapability
	for _, t := range types {
		caps = append(caps, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: caps}, nil
}

func (n *node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: n.id, AccessibleTopology: n.topology()}, nil
}

// visit locks a volume, finishes what was left undone with it, here and as a whole, and returns what this node does with
// it. The caller calls release once.
func (n *node) visit(ctx context.Context, text string) (v catalog.Volume, state catalog.Node, release func(), err error) {
	v, release, err = n.enter(ctx, text)
	if err != nil {
		return v, state, nil, err
	}
	if state, err = n.settleNode(ctx, v); err != nil {
		release()
		return v, state, nil, err
	}
	return v, state, release, nil
}
