package remote_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/fake"
	"crust.dev/crust/runtimehandler/handlertest"
	"crust.dev/crust/runtimehandler/remote"
)

// runtime is a shim per sandbox, each on a socket of its own, with a fake runtime behind.
type runtime struct {
	*fake.Runtime
	dir  string
	stop map[string]func() // by target path
}

func newRuntime(t *testing.T) *runtime {
	dir, err := os.MkdirTemp("", "remote-")
	if err != nil {
		t.Fatal(err)
	}
	r := &runtime{
		Runtime: fake.New("guest", remote.Handler{}.Capabilities()),
		dir:     dir,
		stop:    map[string]func(){},
	}
	t.Cleanup(func() {
		for _, stop := range r.stop {
			stop()
		}
		_ = os.RemoveAll(dir)
	})
	return r
}

func (r *runtime) Handler() runtimehandler.Handler { return remote.Handler{} }

func (r *runtime) Mount(t *testing.T, d runtimehandler.Deferral) runtimehandler.Sandbox {
	t.Helper()
	// A shim resolves its mounts with the daemon; here the daemon is the suite.
	guest := r.Runtime.Handler()
	if err := guest.Stage(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	inside, err := r.Runtime.Mount(d.TargetPath)
	if err != nil {
		t.Fatal(err)
	}
	sandbox := runtimehandler.Sandbox{ID: inside.ID, Runtime: "test", Address: filepath.Join(r.dir, fmt.Sprint(len(r.stop)))}
	ctx, cancel := context.WithCancel(context.Background())
	l, err := rpc.Listen(ctx, sandbox.Address)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- rpc.ServeTTRPC(ctx, l, slog.New(slog.NewTextHandler(io.Discard, nil)), func(_ context.Context, _ rpc.Peer, server *ttrpc.Server) {
			runtimev1.RegisterTTRPCShimService(server, shim{guest: guest, sandbox: inside, target: d.TargetPath})
		})
	}()
	r.stop[d.TargetPath] = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return sandbox
}

func (r *runtime) Unmount(_ *testing.T, d runtimehandler.Deferral) {
	r.Runtime.Unmount(d.TargetPath)
	r.stop[d.TargetPath]()
}

func (r *runtime) Hang(_ *testing.T, d runtimehandler.Deferral) { r.Runtime.Hang(d.TargetPath) }
func (r *runtime) Lose(*testing.T)                              {}

// shim serves the daemon's questions from the fake.
type shim struct {
	guest   runtimehandler.Handler
	sandbox runtimehandler.Sandbox
	target  string
}

func (s shim) GetSandbox(context.Context, *runtimev1.GetSandboxRequest) (*runtimev1.GetSandboxResponse, error) {
	return &runtimev1.GetSandboxResponse{SandboxId: s.sandbox.ID, Volumes: []*runtimev1.SandboxVolume{{TargetPath: s.target, Mounted: true}}}, nil
}

func (s shim) GetVolumeStats(ctx context.Context, req *runtimev1.GetVolumeStatsRequest) (*runtimev1.GetVolumeStatsResponse, error) {
	stats, err := s.guest.Stats(ctx, req.GetTargetPath(), s.sandbox)
	if err != nil {
		return nil, err
	}
	usage, condition := runtimehandler.StatsToProto(stats)
	return &runtimev1.GetVolumeStatsResponse{Usage: usage, Condition: condition}, nil
}

func (s shim) ExpandVolume(ctx context.Context, req *runtimev1.ExpandVolumeRequest) (*runtimev1.ExpandVolumeResponse, error) {
	size, err := s.guest.Expand(ctx, req.GetTargetPath(), s.sandbox, req.GetRequiredBytes())
	return &runtimev1.ExpandVolumeResponse{DeviceBytes: size}, err
}

func (s shim) FreezeVolume(ctx context.Context, req *runtimev1.FreezeVolumeRequest) (*runtimev1.FreezeVolumeResponse, error) {
	return &runtimev1.FreezeVolumeResponse{}, s.guest.Freeze(ctx, req.GetTargetPath(), s.sandbox, req.GetTimeLimit().AsDuration())
}

func (s shim) ThawVolume(ctx context.Context, req *runtimev1.ThawVolumeRequest) (*runtimev1.ThawVolumeResponse, error) {
	return &runtimev1.ThawVolumeResponse{}, s.guest.Thaw(ctx, req.GetTargetPath(), s.sandbox)
}

func TestContract(t *testing.T) {
	handlertest.Run(t, func(t *testing.T) handlertest.Runtime { return newRuntime(t) })
}

// TestAnswersThatAreNone: a shim may be broken, or hostile.
func TestAnswersThatAreNone(t *testing.T) {
	r := newRuntime(t)
	d := runtimehandler.Deferral{VolumeID: "v", TargetPath: "/t", SizeBytes: -1, Device: os.DevNull}
	sandbox := r.Mount(t, d)
	if stats, err := (remote.Handler{}).Stats(t.Context(), "/t", sandbox); !isUnavailable(err) {
		t.Errorf("stats with negative numbers: %+v, %v", stats, err)
	}
	if size, err := (remote.Handler{}).Expand(t.Context(), "/t", sandbox, 1); err == nil {
		t.Errorf("expanded to %d", size)
	}
}

func isUnavailable(err error) bool { return errdefs.IsUnavailable(err) }
