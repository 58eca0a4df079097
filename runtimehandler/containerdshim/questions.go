package containerdshim

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	events "github.com/containerd/containerd/api/events"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/runtime"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Exec announces a process; Start starts it.
func (s *service) Exec(_ context.Context, r *taskv3.ExecProcessRequest) (*emptypb.Empty, error) {
	if err := s.exec(r); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	s.publish(runtime.TaskExecAddedEventTopic, &events.TaskExecAdded{ContainerID: r.GetID(), ExecID: r.GetExecID()})
	return &emptypb.Empty{}, nil
}

func (s *service) exec(r *taskv3.ExecProcessRequest) error {
	c, err := s.container(r.GetID())
	if err != nil {
		return err
	}
	switch {
	case c.sandbox:
		return fmt.Errorf("the sandbox container is the microVM and runs no processes: %w", errdefs.ErrFailedPrecondition)
	case r.GetTerminal():
		return fmt.Errorf("a terminal (tty) is not supported by this runtime; leave -t away: %w", errdefs.ErrNotImplemented)
	}
	v, err := typeurl.UnmarshalAny(r.GetSpec())
	if err != nil {
		return fmt.Errorf("process: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	spec, ok := v.(*specs.Process)
	if !ok {
		return fmt.Errorf("process is a %T: %w", v, errdefs.ErrInvalidArgument)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.execs[r.GetExecID()] != nil {
		return fmt.Errorf("container %s has a process %s: %w", c.id, r.GetExecID(), errdefs.ErrAlreadyExists)
	}
	c.execs[r.GetExecID()] = newProcess(r.GetExecID(), stdio{r.GetStdin(), r.GetStdout(), r.GetStderr()}, c.request(spec, r.GetStdin() != "", ""))
	return nil
}

// State says how a process is.
func (s *service) State(_ context.Context, r *taskv3.StateRequest) (*taskv3.StateResponse, error) {
	c, p, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	status, exit, at := p.state()
	return &taskv3.StateResponse{
		ID: c.id, Bundle: c.bundle, ExecID: p.execID, Pid: s.pid(), Status: status, ExitStatus: exit, ExitedAt: timestamppb.New(at),
		Stdin: p.stdio.in, Stdout: p.stdio.out, Stderr: p.stdio.err,
	}, nil
}

// Wait returns when a process has ended.
func (s *service) Wait(ctx context.Context, r *taskv3.WaitRequest) (*taskv3.WaitResponse, error) {
	_, p, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	select {
	case <-p.exited:
	case <-ctx.Done():
		return nil, errgrpc.ToGRPC(context.Cause(ctx))
	}
	_, exit, at := p.state()
	return &taskv3.WaitResponse{ExitStatus: exit, ExitedAt: timestamppb.New(at)}, nil
}

// CloseIO ends a process's standard input.
func (s *service) CloseIO(ctx context.Context, r *taskv3.CloseIORequest) (*emptypb.Empty, error) {
	c, p, err := s.find(r.GetID(), r.GetExecID())
	if err == nil && r.GetStdin() && !c.sandbox {
		err = p.closeInput(ctx, c.agent())
	}
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}

// Pids is the machine, as far as the host is concerned.
func (s *service) Pids(_ context.Context, r *taskv3.PidsRequest) (*taskv3.PidsResponse, error) {
	if _, err := s.container(r.GetID()); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &taskv3.PidsResponse{Processes: []*task.ProcessInfo{{Pid: s.pid()}}}, nil
}

// Stats is what the machine uses, for the sandbox container; it is not known by container.
func (s *service) Stats(_ context.Context, r *taskv3.StatsRequest) (*taskv3.StatsResponse, error) {
	c, err := s.container(r.GetID())
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if !c.sandbox || c.spec.Linux.CgroupsPath == "" || c.spec.Linux.CgroupsPath[0] != '/' {
		return nil, errgrpc.ToGRPC(fmt.Errorf("use of resources is known for the sandbox only: %w", errdefs.ErrNotImplemented))
	}
	metrics, err := groupStats(c.spec.Linux.CgroupsPath)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	stats, err := typeurl.MarshalAnyToProto(metrics)
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &taskv3.StatsResponse{Stats: stats}, nil
}

func groupStats(path string) (any, error) {
	if cgroups.Mode() == cgroups.Unified {
		g, err := cgroup2.Load(path)
		if err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
		return g.Stat()
	}
	g, err := cgroup1.Load(cgroup1.StaticPath(path))
	if err != nil {
		return nil, fmt.Errorf("control group: %w", err)
	}
	return g.Stat(cgroup1.IgnoreNotExist)
}

// Update would change limits. The machine's are what it was booted with, so it changes nothing, and says nothing either:
// the kubelet updates every container that it starts.
func (s *service) Update(_ context.Context, r *taskv3.UpdateTaskRequest) (*emptypb.Empty, error) {
	if _, err := s.container(r.GetID()); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}

// Connect names the processes of the shim and of the machine.
func (s *service) Connect(context.Context, *taskv3.ConnectRequest) (*taskv3.ConnectResponse, error) {
	return &taskv3.ConnectResponse{ShimPid: uint32(os.Getpid()), TaskPid: s.pid()}, nil
}

// Shutdown ends the shim when it has nothing left to look after.
func (s *service) Shutdown(context.Context, *taskv3.ShutdownRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	left := len(s.containers)
	s.mu.Unlock()
	if left == 0 {
		s.shutdown.Shutdown()
	}
	return &emptypb.Empty{}, nil
}

func notImplemented(what string) error {
	return errgrpc.ToGRPC(fmt.Errorf("%s is not supported by this runtime: %w", what, errdefs.ErrNotImplemented))
}

// Pause is not supported.
func (s *service) Pause(context.Context, *taskv3.PauseRequest) (*emptypb.Empty, error) {
	return nil, notImplemented("pausing")
}

// Resume is not supported.
func (s *service) Resume(context.Context, *taskv3.ResumeRequest) (*emptypb.Empty, error) {
	return nil, notImplemented("resuming")
}

// Checkpoint is not supported.
func (s *service) Checkpoint(context.Context, *taskv3.CheckpointTaskRequest) (*emptypb.Empty, error) {
	return nil, notImplemented("a checkpoint")
}

// ResizePty is not supported: there are no terminals.
func (s *service) ResizePty(context.Context, *taskv3.ResizePtyRequest) (*emptypb.Empty, error) {
	return nil, notImplemented("a terminal")
}
