package sandbox

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
)

// Connect opens a line to a sandbox's control socket, which serves Shim, and of Agent what looks and what runs commands.
// ErrNotFound if there is no such sandbox, ErrUnavailable if it is dead.
func Connect(ctx context.Context, root, id string) (*ttrpc.Client, error) {
	info, err := Read(root, id)
	if err != nil {
		return nil, err
	}
	if !info.Alive {
		return nil, fmt.Errorf("sandbox %s is dead; clean up with crust-sandbox stop %s: %w", id, id, errdefs.ErrUnavailable)
	}
	return rpc.DialTTRPC(ctx, filepath.Join(root, id, controlName))
}

// people is the part of the guest's agent that the control socket serves. What mounts and unmounts is left to the
// sandbox itself.
type people struct {
	guestv1.UnimplementedAgentServer
	agent guestv1.TTRPCAgentService
}

// relay hands a call on to the guest.
func relay[Req, Resp any](ctx context.Context, call func(context.Context, *Req) (*Resp, error), req *Req) (*Resp, error) {
	resp, err := call(ctx, req)
	return resp, rpc.Relay(err)
}

func (p people) GetInfo(ctx context.Context, req *guestv1.GetInfoRequest) (*guestv1.GetInfoResponse, error) {
	return relay(ctx, p.agent.GetInfo, req)
}

func (p people) TrimVolume(ctx context.Context, req *guestv1.TrimVolumeRequest) (*guestv1.TrimVolumeResponse, error) {
	return relay(ctx, p.agent.TrimVolume, req)
}

func (p people) StartExec(ctx context.Context, req *guestv1.StartExecRequest) (*guestv1.StartExecResponse, error) {
	return relay(ctx, p.agent.StartExec, req)
}

func (p people) ReadExec(ctx context.Context, req *guestv1.ReadExecRequest) (*guestv1.ReadExecResponse, error) {
	return relay(ctx, p.agent.ReadExec, req)
}

func (p people) WriteExec(ctx context.Context, req *guestv1.WriteExecRequest) (*guestv1.WriteExecResponse, error) {
	return relay(ctx, p.agent.WriteExec, req)
}

func (p people) SignalExec(ctx context.Context, req *guestv1.SignalExecRequest) (*guestv1.SignalExecResponse, error) {
	return relay(ctx, p.agent.SignalExec, req)
}

func (p people) CloseExec(ctx context.Context, req *guestv1.CloseExecRequest) (*guestv1.CloseExecResponse, error) {
	return relay(ctx, p.agent.CloseExec, req)
}
