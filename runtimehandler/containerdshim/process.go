package containerdshim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/fifo"
	"golang.org/x/sys/unix"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/sandbox"
)

// guestTimeout bounds a call to the agent that does not wait for a device.
const guestTimeout = 30 * time.Second

// exitLost is the exit code of a process whose machine has ended: as if it had been killed.
const exitLost = 128 + uint32(unix.SIGKILL)

// stdio are the paths of the pipes that containerd reads and writes; empty is none.
type stdio struct{ in, out, err string }

// process is a container's first process, or one that was started in it later.
type process struct {
	execID string // empty: the first
	stdio  stdio
	// request starts it in the guest; nil: the sandbox container's, which is the machine.
	request *guestv1.StartExecRequest

	mu       sync.Mutex
	status   task.Status
	guestID  string // its name in the guest
	pipes    []io.Closer
	exit     uint32
	exitedAt time.Time
	exited   chan struct{} // closed when it has ended, and its output was handed over
}

func newProcess(execID string, s stdio, request *guestv1.StartExecRequest) *process {
	return &process{execID: execID, stdio: s, request: request, status: task.Status_CREATED, exited: make(chan struct{})}
}

// start starts the process in the guest. onExit is called once, when it has ended. The guest may answer late or never:
// then the process counts as one that did not start, and ends with its container.
func (p *process) start(ctx context.Context, agent guestv1.TTRPCAgentService, onExit func()) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.status != task.Status_CREATED {
		return fmt.Errorf("process is %v: %w", p.status, errdefs.ErrFailedPrecondition)
	}
	stdin, stdout, stderr, err := p.open(ctx)
	if err != nil {
		p.closePipes()
		return err
	}
	ctx = context.WithoutCancel(ctx)
	callCtx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	resp, err := agent.StartExec(callCtx, p.request)
	if err != nil {
		p.closePipes()
		return rpc.FromWire(err)
	}
	p.guestID, p.status = resp.GetExecId(), task.Status_RUNNING
	go func() {
		inputCtx, stopInput := context.WithCancel(ctx)
		defer stopInput()
		if stdin != nil {
			go sandbox.Feed(inputCtx, agent, resp.GetExecId(), stdin)
		}
		code, err := sandbox.Follow(ctx, agent, resp.GetExecId(), stdout, stderr)
		if err != nil {
			code = int(exitLost) // the machine has ended, or containerd has closed the pipes
		}
		p.end(uint32(code), onExit)
	}()
	return nil
}

// open opens the pipes. Each is opened for reading and writing, so that opening waits for nobody, and a containerd that
// restarts does not end the process.
func (p *process) open(ctx context.Context) (stdin io.Reader, stdout, stderr io.Writer, err error) {
	one := func(path string) io.ReadWriteCloser {
		if path == "" || err != nil {
			return nil
		}
		var f io.ReadWriteCloser
		if f, err = fifo.OpenFifo(context.WithoutCancel(ctx), path, syscall.O_RDWR, 0); err != nil {
			err = fmt.Errorf("pipe %s: %w", path, err)
			return nil
		}
		p.pipes = append(p.pipes, f)
		return f
	}
	if f := one(p.stdio.in); f != nil {
		stdin = f
	}
	if f := one(p.stdio.out); f != nil {
		stdout = f
	}
	if f := one(p.stdio.err); f != nil {
		stderr = f
	}
	return stdin, stdout, stderr, err
}

func (p *process) closePipes() {
	for _, f := range p.pipes {
		_ = f.Close()
	}
	p.pipes = nil
}

// end notes that the process has ended, unless that is known.
func (p *process) end(code uint32, onExit func()) {
	p.mu.Lock()
	if p.status == task.Status_STOPPED {
		p.mu.Unlock()
		return
	}
	p.closePipes()
	p.status, p.exit, p.exitedAt = task.Status_STOPPED, code, time.Now()
	p.mu.Unlock()
	onExit()
	close(p.exited)
}

// state returns what is known of the process.
func (p *process) state() (status task.Status, exit uint32, exitedAt time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status, p.exit, p.exitedAt
}

// guest returns the name of the process in the guest; empty: it has not been started.
func (p *process) guest() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.guestID
}

// signal signals the process. ErrNotFound if it has ended, as containerd expects.
func (p *process) signal(ctx context.Context, agent guestv1.TTRPCAgentService, sig uint32, all bool) error {
	status, _, _ := p.state()
	if status != task.Status_RUNNING {
		return fmt.Errorf("process is not running: %w", errdefs.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	_, err := agent.SignalExec(ctx, &guestv1.SignalExecRequest{ExecId: p.guest(), Signal: sig, All: all && p.execID == "" && sig == uint32(unix.SIGKILL)})
	return rpc.FromWire(err)
}

// closeInput ends the process's standard input.
func (p *process) closeInput(ctx context.Context, agent guestv1.TTRPCAgentService) error {
	id := p.guest()
	if id == "" || p.stdio.in == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	_, err := agent.WriteExec(ctx, &guestv1.WriteExecRequest{ExecId: id, Close: true})
	if err = rpc.FromWire(err); errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrFailedPrecondition) {
		return nil // it reads no more, or is gone
	}
	return err
}

// forget removes the process from the guest. A machine that has ended has none.
func (p *process) forget(ctx context.Context, agent guestv1.TTRPCAgentService) error {
	id := p.guest()
	if id == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	_, err := agent.CloseExec(ctx, &guestv1.CloseExecRequest{ExecId: id})
	return rpc.FromWire(err)
}
