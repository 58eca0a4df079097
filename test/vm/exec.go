package vm

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
)

// readWait is how long the agent may wait for output before it answers.
const readWait = 5 * time.Second

// Command is a command that runs in the guest.
type Command struct {
	m  *Machine
	t  testing.TB
	ID string
}

// Begin starts a command, which ends with the test at the latest.
func (m *Machine) Begin(t testing.TB, argv ...string) *Command {
	t.Helper()
	resp, err := m.Agent().StartExec(Context(t), &guestv1.StartExecRequest{Argv: argv})
	if err != nil {
		t.Fatalf("start %q: %v", argv, rpc.FromWire(err))
	}
	return m.Attend(t, resp.GetExecId())
}

// Attend takes over a command that was started otherwise; it ends with the test at the latest.
func (m *Machine) Attend(t testing.TB, id string) *Command {
	c := &Command{m: m, t: t, ID: id}
	t.Cleanup(c.Close)
	return c
}

// Close kills the command. The machine may be gone.
func (c *Command) Close() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.t.Context()), Timeout)
	defer cancel()
	_, _ = c.m.Agent().CloseExec(ctx, &guestv1.CloseExecRequest{ExecId: c.ID})
}

// Read waits for some output or for the end. The error is one of ours.
func (c *Command) Read() (*guestv1.ReadExecResponse, error) {
	resp, err := c.m.Agent().ReadExec(Context(c.t), &guestv1.ReadExecRequest{ExecId: c.ID, Wait: durationpb.New(readWait)})
	return resp, rpc.FromWire(err)
}

// ReadUntil reads until the standard output so far has a text in it, and returns that output.
func (c *Command) ReadUntil(text string) string {
	c.t.Helper()
	var out strings.Builder
	for !strings.Contains(out.String(), text) {
		resp, err := c.Read()
		if err != nil {
			c.t.Fatalf("output: %v", err)
		}
		out.Write(resp.GetStdout())
		if resp.GetExited() && !strings.Contains(out.String(), text) {
			c.t.Fatalf("the command ended with %d before it said %q; output %q, errors %q", resp.GetExitCode(), text, out.String(), resp.GetStderr())
		}
	}
	return out.String()
}

// Wait reads until the command ends.
func (c *Command) Wait() (stdout, stderr string, code int) {
	c.t.Helper()
	var out, errs strings.Builder
	for {
		resp, err := c.Read()
		if err != nil {
			c.t.Fatalf("output: %v", err)
		}
		out.Write(resp.GetStdout())
		errs.Write(resp.GetStderr())
		if resp.GetExited() {
			return out.String(), errs.String(), int(resp.GetExitCode())
		}
	}
}

// Run runs a command that has to succeed, and returns what it wrote to its standard output, without space at the ends.
func (m *Machine) Run(t testing.TB, argv ...string) string {
	t.Helper()
	stdout, stderr, code := m.Begin(t, argv...).Wait()
	if code != 0 {
		t.Fatalf("%q: exit code %d: %s%s", argv, code, stdout, stderr)
	}
	return strings.TrimSpace(stdout)
}

// Shell is Run for a script.
func (m *Machine) Shell(t testing.TB, script string) string {
	t.Helper()
	return m.Run(t, "sh", "-euc", script)
}
