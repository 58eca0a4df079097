package csiplugin

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/protocol/csi/deferred"
)

// NodeGetVolumeStats measures the filesystem where it is mounted on the host. Elsewhere (a block device, a staging path
// that nothing is mounted at, a sandbox) it reports the volume's size, and as used what the volume takes of the pool.
//
// It takes no lock: it changes nothing, it may take long on a busy filesystem, and the CO asks every minute. It never
// measures another filesystem than the volume's, whatever another call does meanwhile.
func (n *node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	var ext deferred.NodeGetVolumeStatsRequestExtension
	if err := deferred.Get(req, &ext); err != nil {
		return nil, err
	}
	if req.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	if req.GetVolumePath() == "" {
		return nil, invalid("volume_path is missing")
	}
	v, state, err := n.look(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	// A path that is not absolute is one where the volume is not.
	at, err := n.locate(v, state, req.GetVolumePath(), ext.GetDeferFsOps())
	if err != nil {
		return nil, err
	}
	if !at.mounted {
		return n.dataUsage(ctx, v)
	}
	ours, err := n.ours(v)
	if err != nil {
		return nil, err
	}
	u, err := hostmount.UsageAt(req.GetVolumePath(), ours)
	if err != nil {
		return nil, err
	}
	usage := []*csi.VolumeUsage{usageOf(csi.VolumeUsage_BYTES, u.Bytes)}
	if u.Inodes.Total > 0 {
		usage = append(usage, usageOf(csi.VolumeUsage_INODES, u.Inodes))
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

func (n *node) dataUsage(ctx context.Context, v catalog.Volume) (*csi.NodeGetVolumeStatsResponse, error) {
	st, err := n.stat(ctx, v)
	if err != nil {
		return nil, err
	}
	used := min(st.Allocated, st.Size)
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		usageOf(csi.VolumeUsage_BYTES, hostmount.Amount{Total: st.Size, Used: used, Available: st.Size - used}),
	}}, nil
}

func usageOf(unit csi.VolumeUsage_Unit, a hostmount.Amount) *csi.VolumeUsage {
	return &csi.VolumeUsage{Unit: unit, Total: a.Total, Used: a.Used, Available: a.Available}
}
