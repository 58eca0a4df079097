package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
)

const (
	// execWait is how long the agent may wait for output before it answers.
	execWait = 5 * time.Second
	// execTimeout bounds a call to the agent.
	execTimeout = 20 * time.Second
	// stdinChunk is how much input is sent at a time, in bytes.
	stdinChunk = 32 << 10
)

// Command is a command to run in a guest.
type Command struct {
	Argv []string
	Env  []string
	Dir  string
	// Stdin may be nil; a reader that blocks is left behind when the command ends.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// Exec runs a command in a guest, copies its output as it comes, and returns its exit code. When ctx ends the command
// is killed.
func Exec(ctx context.Context, agent guestv1.TTRPCAgentService, c Command) (exit int, err error) {
	start, err := timed(ctx, agent.StartExec, &guestv1.StartExecRequest{Argv: c.Argv, Env: c.Env, Cwd: c.Dir, Stdin: c.Stdin != nil})
	if err != nil {
		return 0, fmt.Errorf("start %q: %w", c.Argv, err)
	}
	id := start.GetExecId()
	defer func() {
		_, closeErr := timed(context.WithoutCancel(ctx), agent.CloseExec, &guestv1.CloseExecRequest{ExecId: id})
		err = errors.Join(err, closeErr)
	}()
	if c.Stdin != nil {
		inputCtx, cancel := context.WithCancel(ctx)
		defer cancel()
		go Feed(inputCtx, agent, id, c.Stdin)
	}
	exit, err = Follow(ctx, agent, id, c.Stdout, c.Stderr)
	if err != nil {
		return 0, fmt.Errorf("output of %q: %w", c.Argv, err)
	}
	return exit, nil
}

// Follow copies the output of a command that was started until it ends, and returns its exit code. Either writer may be
// nil. The command stays open.
func Follow(ctx context.Context, agent guestv1.TTRPCAgentService, id string, stdout, stderr io.Writer) (exit int, err error) {
	for {
		out, err := timed(ctx, agent.ReadExec, &guestv1.ReadExecRequest{ExecId: id, Wait: durationpb.New(execWait)})
		if err != nil {
			return 0, err
		}
		if err := errors.Join(write(stdout, out.GetStdout()), write(stderr, out.GetStderr())); err != nil {
			return 0, err
		}
		if out.GetExited() {
			return int(out.GetExitCode()), nil
		}
	}
}

// Feed copies input to a command, which was started with stdin, until it ends or the command does.
func Feed(ctx context.Context, agent guestv1.TTRPCAgentService, id string, from io.Reader) {
	buf := make([]byte, stdinChunk)
	for {
		n, err := from.Read(buf)
		req := &guestv1.WriteExecRequest{ExecId: id, Data: buf[:n], Close: err != nil}
		if _, sendErr := timed(ctx, agent.WriteExec, req); sendErr != nil || err != nil {
			return // the command no longer reads, or has all there is
		}
	}
}

func write(w io.Writer, data []byte) error {
	if w == nil || len(data) == 0 {
		return nil
	}
	_, err := w.Write(data)
	return err
}

// timed makes one call with a time limit, and turns its status into an error of ours.
func timed[Req, Resp any](ctx context.Context, call func(context.Context, *Req) (*Resp, error), req *Req) (*Resp, error) {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	resp, err := call(ctx, req)
	if err = rpc.FromWire(err); errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the guest does not answer: %w", errdefs.ErrUnavailable)
	}
	return resp, err
}
