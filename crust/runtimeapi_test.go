package crust_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
)

// TestRuntimeService plays a driver that follows KEP-2857 to the letter, over both transports.
func TestRuntimeService(t *testing.T) {
	n := newNode(t)
	conn, err := rpc.Dial(n.path("kep.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client, err := rpc.DialTTRPC(t.Context(), n.path("rt.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	overGRPC := runtimev1.NewRuntimeClient(conn)
	for name, service := range map[string]runtimev1.TTRPCRuntimeService{
		"ttrpc": runtimev1.NewTTRPCRuntimeClient(client),
		"grpc":  grpcRuntime{overGRPC},
	} {
		t.Run(name, func(t *testing.T) { playDriver(ctx, t, n, name, service) })
	}
}

func playDriver(ctx context.Context, t *testing.T, n *node, name string, service runtimev1.TTRPCRuntimeService) {
	device := n.driver.Volume(t, name, 64<<20)
	target := n.target(name)
	req := func() *runtimev1.RuntimeStageVolumeRequest {
		return &runtimev1.RuntimeStageVolumeRequest{
			VolumeType: runtimev1.VolumeType_VOLUME_TYPE_BLOCK, VolumeTargetPath: target, VolumeBackingPath: device, FsType: "ext4",
			VolumeSupplementalGroup: "7",
		}
	}
	for what, change := range map[string]func(*runtimev1.RuntimeStageVolumeRequest) error{
		"volume_type": func(r *runtimev1.RuntimeStageVolumeRequest) error {
			r.VolumeType = 0
			return errdefs.ErrInvalidArgument
		},
		"network filesystem": func(r *runtimev1.RuntimeStageVolumeRequest) error { r.VolumeType = 2; return errdefs.ErrNotImplemented },
		"volume_target_path": func(r *runtimev1.RuntimeStageVolumeRequest) error {
			r.VolumeTargetPath = "x"
			return errdefs.ErrInvalidArgument
		},
		"are required": func(r *runtimev1.RuntimeStageVolumeRequest) error { r.FsType = ""; return errdefs.ErrInvalidArgument },
		"neither": func(r *runtimev1.RuntimeStageVolumeRequest) error {
			r.VolumeBackingPath = "/dev/null"
			return errdefs.ErrFailedPrecondition
		},
		"without volume_supp": func(r *runtimev1.RuntimeStageVolumeRequest) error {
			r.VolumeSupplementalGroup = ""
			r.VolumeSupplementalGroupChangePolicy = 1
			return errdefs.ErrInvalidArgument
		},
		"group id": func(r *runtimev1.RuntimeStageVolumeRequest) error {
			r.VolumeSupplementalGroup = "staff"
			return errdefs.ErrInvalidArgument
		},
	} {
		bad := req()
		kind := change(bad)
		_, err := service.RuntimeStageVolume(ctx, bad)
		wantKind(t, err, kind, what)
	}
	for range 2 {
		if _, err := service.RuntimeStageVolume(ctx, req()); err != nil {
			t.Fatal(err)
		}
	}
	if !sealed(target) {
		t.Error("the target path is not sealed")
	}
	other := req()
	other.FsType = "xfs"
	_, err := service.RuntimeStageVolume(ctx, other)
	wantKind(t, err, errdefs.ErrAlreadyExists, "other arguments")
	_, err = service.RuntimeGetVolumeStats(ctx, &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target})
	wantKind(t, err, errdefs.ErrUnavailable, "no sandbox has mounted it")

	s := n.sandbox("kep-"+name, nil)
	resolved, err := s.mount(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	if d := resolved[0].Deferral; d.Format || d.Group == nil || *d.Group != 7 {
		t.Errorf("resolved %+v", d)
	}
	stats, err := service.RuntimeGetVolumeStats(ctx, &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() != 64<<20 || stats.GetVolumeCondition().GetAbnormal() {
		t.Errorf("stats: %v, %v", stats, err)
	}
	_, err = service.RuntimeExpandVolume(ctx, &runtimev1.RuntimeExpandVolumeRequest{VolumeTargetPath: target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: 96 << 20}})
	wantKind(t, err, errdefs.ErrOutOfRange, "grow the device first")
	if err := os.Truncate(device, 96<<20); err != nil {
		t.Fatal(err)
	}
	grown, err := service.RuntimeExpandVolume(ctx, &runtimev1.RuntimeExpandVolumeRequest{VolumeTargetPath: target})
	if err != nil || grown.GetCapacityBytes() != 96<<20 {
		t.Errorf("expand: %v, %v", grown, err)
	}
	_, err = service.RuntimeUnstageVolume(ctx, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
	wantKind(t, err, errdefs.ErrFailedPrecondition, "held by sandbox")
	if err := s.client.Released(ctx, target); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := service.RuntimeUnstageVolume(ctx, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRuntimeServiceKeepsOff: what came by CSI goes by CSI.
func TestRuntimeServiceKeepsOff(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	conn, err := rpc.Dial(n.path("kep.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = runtimev1.NewRuntimeClient(conn).RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: target})
	wantKind(t, err, errdefs.ErrFailedPrecondition, "published by CSI driver")
}

// grpcRuntime gives the gRPC client the shape of the ttrpc one.
type grpcRuntime struct{ c runtimev1.RuntimeClient }

func (g grpcRuntime) RuntimeStageVolume(ctx context.Context, r *runtimev1.RuntimeStageVolumeRequest) (*runtimev1.RuntimeStageVolumeResponse, error) {
	return g.c.RuntimeStageVolume(ctx, r)
}

func (g grpcRuntime) RuntimeUnstageVolume(ctx context.Context, r *runtimev1.RuntimeUnstageVolumeRequest) (*runtimev1.RuntimeUnstageVolumeResponse, error) {
	return g.c.RuntimeUnstageVolume(ctx, r)
}

func (g grpcRuntime) RuntimeGetVolumeStats(ctx context.Context, r *runtimev1.RuntimeGetVolumeStatsRequest) (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	return g.c.RuntimeGetVolumeStats(ctx, r)
}

func (g grpcRuntime) RuntimeExpandVolume(ctx context.Context, r *runtimev1.RuntimeExpandVolumeRequest) (*runtimev1.RuntimeExpandVolumeResponse, error) {
	return g.c.RuntimeExpandVolume(ctx, r)
}
