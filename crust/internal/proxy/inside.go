package proxy

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// NodeGetVolumeStats is that of CSI: for a deferral the answer comes from inside the sandbox, because on the host there
// is nothing but the node's own filesystem to measure.
func (n *node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if !n.deferrals.Has(req.GetVolumePath()) {
		resp, err := n.provider.Node().NodeGetVolumeStats(ctx, req)
		return resp, rpc.Relay(err)
	}
	if _, err := n.owner(ctx, req.GetVolumePath(), req.GetVolumeId()); err != nil {
		return nil, err
	}
	stats, err := n.deferrals.Stats(ctx, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		usage(stats.Bytes, csi.VolumeUsage_BYTES),
		usage(stats.Inodes, csi.VolumeUsage_INODES),
	}}, nil
}

func usage(u runtimehandler.Usage, unit csi.VolumeUsage_Unit) *csi.VolumeUsage {
	return &csi.VolumeUsage{Total: u.Total, Available: u.Available, Used: u.Used, Unit: unit}
}

// NodeExpandVolume is that of CSI: for a deferral the driver grows the device, and the sandbox the filesystem.
func (n *node) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if !n.deferrals.Has(req.GetVolumePath()) {
		resp, err := n.provider.Node().NodeExpandVolume(ctx, req)
		return resp, rpc.Relay(err)
	}
	if err := validRange(req.GetCapacityRange()); err != nil {
		return nil, err
	}
	driver, err := n.owner(ctx, req.GetVolumePath(), req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	volume := n.provider.PublishedVolume(driver, req.GetVolumeId(), req.GetVolumePath())
	size, err := n.deferrals.Expand(ctx, req.GetVolumePath(), func(ctx context.Context) (int64, error) { return volume.Expand(ctx, req) })
	if err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: size}, nil
}

func validRange(r *csi.CapacityRange) error {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return invalid("capacity_range has a negative number (%d, %d)", required, limit)
	case limit != 0 && limit < required:
		return fmt.Errorf("capacity_range: limit_bytes %d is less than required_bytes %d: %w", limit, required, errdefs.ErrOutOfRange)
	}
	return nil
}

// NodeGetVolumeHealth is that of CSI: what the driver knows, if it knows anything, and for a deferral also what is wrong
// inside the sandbox.
func (n *node) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	driver, err := n.provider.Name(ctx)
	if err != nil {
		return nil, err
	}
	records := n.deferrals.OfVolume(driver, req.GetVolumeId())
	resp, err := n.provider.Node().NodeGetVolumeHealth(ctx, req)
	if len(records) > 0 && errdefs.IsNotImplemented(rpc.FromWire(err)) {
		resp, err = &csi.NodeGetVolumeHealthResponse{}, nil
	}
	if err != nil {
		return nil, rpc.Relay(err)
	}
	for _, rec := range records {
		if path := req.GetVolumePublishPath(); path != "" && path != rec.Deferral.TargetPath {
			continue
		}
		if entry := health(n.deferrals.Stats(ctx, rec.Deferral.TargetPath)); entry != nil {
			if resp.VolumeHealth == nil {
				resp.VolumeHealth = &csi.VolumeHealth{VolumeId: req.GetVolumeId()}
			}
			resp.VolumeHealth.HealthStatuses = append(resp.VolumeHealth.HealthStatuses, entry)
		}
	}
	return resp, nil
}

// health turns the outcome of a measurement into an entry, or nil if nothing is wrong. A volume that is not mounted yet
// is not ill.
func health(stats runtimehandler.Stats, err error) *csi.VolumeHealth_VolumeHealthEntry {
	switch {
	case errors.Is(err, deferrals.ErrNotMounted):
		return nil
	case errors.Is(err, deferrals.ErrBreached):
		return &csi.VolumeHealth_VolumeHealthEntry{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "SandboxWithoutVolume", Message: err.Error()}
	case errdefs.IsFailedPrecondition(err), errdefs.IsNotImplemented(err):
		return nil // the sandbox is there and cannot measure, which says nothing of the volume
	case err != nil:
		return &csi.VolumeHealth_VolumeHealthEntry{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "SandboxUnreachable", Message: err.Error()}
	case stats.Abnormal:
		return &csi.VolumeHealth_VolumeHealthEntry{Status: csi.VolumeHealthErrorType_DEGRADED, Reason: "FilesystemAbnormal", Message: stats.Message}
	}
	return nil
}
