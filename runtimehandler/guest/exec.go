package guest

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/process"
)

// killTimeout is how long a killed command may take to be gone.
const killTimeout = 5 * time.Second

// StartExec is that of the API.
func (a *Agent) StartExec(ctx context.Context, req *guestv1.StartExecRequest) (*guestv1.StartExecResponse, error) {
	spec, err := checkExec(req)
	if err != nil {
		return nil, err
	}
	if c := req.GetContainer(); c != nil {
		v, release, err := a.acquireMounted(ctx, c.GetRoot())
		if err != nil {
			return nil, err
		}
		defer release()
		if v.root == nil {
			return nil, fmt.Errorf("the volume at %s is no container's root filesystem; prepare it first: %w", v.path, errdefs.ErrFailedPrecondition)
		}
	}
	p, err := a.commands.Start(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &guestv1.StartExecResponse{ExecId: p.ID, Pid: int64(p.PID)}, nil
}

// ReadExec is that of the API.
func (a *Agent) ReadExec(ctx context.Context, req *guestv1.ReadExecRequest) (*guestv1.ReadExecResponse, error) {
	wait, err := duration("wait", req.GetWait(), maxReadWait)
	if err != nil {
		return nil, err
	}
	p, err := a.commands.Get(req.GetExecId())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	stdout, stderr, exited, code := p.Read(ctx)
	return &guestv1.ReadExecResponse{Stdout: stdout, Stderr: stderr, Exited: exited, ExitCode: int32(code)}, nil
}

// WriteExec is that of the API.
func (a *Agent) WriteExec(ctx context.Context, req *guestv1.WriteExecRequest) (*guestv1.WriteExecResponse, error) {
	if len(req.GetData()) > process.MaxChunk {
		return nil, invalid("data has %d bytes, %d are the most", len(req.GetData()), process.MaxChunk)
	}
	p, err := a.commands.Get(req.GetExecId())
	if err != nil {
		return nil, err
	}
	if err := p.Write(ctx, req.GetData(), req.GetClose()); err != nil {
		return nil, err
	}
	return &guestv1.WriteExecResponse{}, nil
}

// SignalExec is that of the API.
func (a *Agent) SignalExec(_ context.Context, req *guestv1.SignalExecRequest) (*guestv1.SignalExecResponse, error) {
	if req.GetSignal() == 0 || req.GetSignal() > maxSignal {
		return nil, invalid("signal %d: want 1 to %d", req.GetSignal(), maxSignal)
	}
	p, err := a.commands.Get(req.GetExecId())
	if err != nil {
		return nil, err
	}
	if req.GetAll() {
		if unix.Signal(req.GetSignal()) != unix.SIGKILL {
			return nil, invalid("signal %d for all processes: want %d", req.GetSignal(), unix.SIGKILL)
		}
		err = p.KillAll()
	} else {
		err = p.Signal(unix.Signal(req.GetSignal()))
	}
	if err != nil {
		return nil, err
	}
	return &guestv1.SignalExecResponse{}, nil
}

// CloseExec is that of the API. A command that is not open is success.
func (a *Agent) CloseExec(ctx context.Context, req *guestv1.CloseExecRequest) (*guestv1.CloseExecResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := a.commands.Remove(ctx, req.GetExecId()); err != nil {
		return nil, err
	}
	return &guestv1.CloseExecResponse{}, nil
}
