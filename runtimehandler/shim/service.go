package shim

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// Register serves the daemon's questions about the volumes (service Shim of crust.runtime.v1) on a server.
func (v *Volumes) Register(server *ttrpc.Server) {
	runtimev1.RegisterTTRPCShimService(server, service{v})
}

// service is the wire side of Volumes.
type service struct{ *Volumes }

// held returns a mounted volume with its lock held.
func (v *Volumes) held(targetPath string) (*volume, error) {
	v.mu.Lock()
	vol := v.volumes[targetPath]
	v.mu.Unlock()
	if vol != nil {
		vol.mu.Lock()
		if vol.mounted {
			return vol, nil
		}
		vol.mu.Unlock()
	}
	return nil, fmt.Errorf("sandbox %s has no volume mounted for %s: %w", v.client.request.GetSandboxId(), targetPath, errdefs.ErrNotFound)
}

// GetSandbox is that of the API.
func (s service) GetSandbox(context.Context, *runtimev1.GetSandboxRequest) (*runtimev1.GetSandboxResponse, error) {
	resp := &runtimev1.GetSandboxResponse{SandboxId: s.client.request.GetSandboxId(), Runtime: s.client.request.GetRuntime()}
	for _, vol := range s.all() {
		// A volume whose lock is held is on its way in or out: that is held, and not mounted.
		claimed, mounted := true, false
		if vol.mu.TryLock() {
			claimed, mounted = vol.claimed, vol.mounted
			vol.mu.Unlock()
		}
		if claimed {
			resp.Volumes = append(resp.Volumes, &runtimev1.SandboxVolume{TargetPath: vol.target, Mounted: mounted})
		}
	}
	slices.SortFunc(resp.Volumes, func(a, b *runtimev1.SandboxVolume) int { return strings.Compare(a.GetTargetPath(), b.GetTargetPath()) })
	return resp, nil
}

// GetVolumeStats is that of the API.
func (s service) GetVolumeStats(ctx context.Context, req *runtimev1.GetVolumeStatsRequest) (*runtimev1.GetVolumeStatsResponse, error) {
	vol, err := s.held(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	mountPath := guestPath(vol.deferral)
	vol.mu.Unlock() // to measure is no reason to hold up a release
	resp, err := s.agent.GetVolumeStats(ctx, &guestv1.GetVolumeStatsRequest{MountPath: mountPath})
	if err != nil {
		return nil, fmt.Errorf("guest: %w", rpc.FromWire(err))
	}
	usage, condition := runtimehandler.StatsToProto(runtimehandler.Stats{
		Bytes:    runtimehandler.Usage{Total: resp.GetTotalBytes(), Available: resp.GetAvailableBytes(), Used: resp.GetUsedBytes()},
		Inodes:   runtimehandler.Usage{Total: resp.GetTotalInodes(), Available: resp.GetAvailableInodes(), Used: resp.GetUsedInodes()},
		Abnormal: resp.GetAbnormal(),
		Message:  resp.GetMessage(),
	})
	return &runtimev1.GetVolumeStatsResponse{Usage: usage, Condition: condition}, nil
}

// ExpandVolume is that of the API.
func (s service) ExpandVolume(ctx context.Context, req *runtimev1.ExpandVolumeRequest) (*runtimev1.ExpandVolumeResponse, error) {
	vol, err := s.held(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	defer vol.mu.Unlock()
	size, err := s.vm.ResizeDisk(ctx, vol.deferral.Serial)
	if err != nil {
		return nil, err
	}
	if size < req.GetRequiredBytes() {
		return nil, fmt.Errorf("device of volume %s has %d bytes, %d are required; grow it first: %w",
			vol.deferral.VolumeID, size, req.GetRequiredBytes(), errdefs.ErrFailedPrecondition)
	}
	resp, err := s.agent.GrowVolume(ctx, &guestv1.GrowVolumeRequest{MountPath: guestPath(vol.deferral), MinDeviceBytes: size})
	if err != nil {
		return nil, fmt.Errorf("guest: %w", rpc.FromWire(err))
	}
	return &runtimev1.ExpandVolumeResponse{DeviceBytes: resp.GetDeviceBytes()}, nil
}

// FreezeVolume is that of the API.
func (s service) FreezeVolume(ctx context.Context, req *runtimev1.FreezeVolumeRequest) (*runtimev1.FreezeVolumeResponse, error) {
	vol, err := s.held(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	defer vol.mu.Unlock()
	if _, err := s.agent.FreezeVolume(ctx, &guestv1.FreezeVolumeRequest{MountPath: guestPath(vol.deferral), TimeLimit: req.GetTimeLimit()}); err != nil {
		return nil, fmt.Errorf("guest: %w", rpc.FromWire(err))
	}
	return &runtimev1.FreezeVolumeResponse{}, nil
}

// ThawVolume is that of the API.
func (s service) ThawVolume(ctx context.Context, req *runtimev1.ThawVolumeRequest) (*runtimev1.ThawVolumeResponse, error) {
	vol, err := s.held(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	defer vol.mu.Unlock()
	if _, err := s.agent.ThawVolume(ctx, &guestv1.ThawVolumeRequest{MountPath: guestPath(vol.deferral)}); err != nil {
		return nil, fmt.Errorf("guest: %w", rpc.FromWire(err))
	}
	return &runtimev1.ThawVolumeResponse{}, nil
}
