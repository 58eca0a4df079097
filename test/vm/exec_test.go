package vm_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/test/vm"
)

// TestCommands is what runs in a guest for somebody outside.
func TestCommands(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	agent := m.Agent()
	t.Run("streams and exit codes", func(t *testing.T) {
		stdout, stderr, code := m.Begin(t, "sh", "-c", "echo out; echo err >&2; exit 3").Wait()
		if stdout != "out\n" || stderr != "err\n" || code != 3 {
			t.Errorf("%q, %q, %d", stdout, stderr, code)
		}
		if _, _, code := m.Begin(t, "sh", "-c", "kill -TERM $$").Wait(); code != 128+15 {
			t.Errorf("ended by SIGTERM: %d", code)
		}
	})
	t.Run("more output than anybody keeps", func(t *testing.T) {
		stdout, _, code := m.Begin(t, "sh", "-c", "seq 1 300000").Wait()
		if lines := strings.Count(stdout, "\n"); lines != 300000 || code != 0 || !strings.HasSuffix(stdout, "\n300000\n") {
			t.Errorf("%d lines, code %d", lines, code)
		}
	})
	t.Run("nobody reads", func(t *testing.T) {
		flood := m.Begin(t, "yes")
		// The command waits with a full pipe: the agent has all its memory for others.
		m.Shell(t, "for i in $(seq 100); do grep -ls '^Name:.yes$' /proc/[0-9]*/status | xargs -r grep -ls '^State:.S' | grep -q . && exit 0; sleep 0.1; done; exit 1")
		if got := m.Run(t, "echo", "hello"); got != "hello" {
			t.Errorf("another command says %q", got)
		}
		if _, err := agent.SignalExec(vm.Context(t), &guestv1.SignalExecRequest{ExecId: flood.ID, Signal: 15}); err != nil {
			t.Fatal(rpc.FromWire(err))
		}
		if stdout, _, code := flood.Wait(); code != 128+15 || len(stdout) < 64<<10 || len(stdout) > 1<<20 {
			t.Errorf("%d bytes, code %d", len(stdout), code)
		}
	})
	t.Run("input", func(t *testing.T) {
		resp, err := agent.StartExec(vm.Context(t), &guestv1.StartExecRequest{
			Argv: []string{"sh", "-c", "cd $DIR; pwd; cat"}, Env: []string{"DIR=/tmp"}, Cwd: "/usr", Stdin: true,
		})
		if err != nil {
			t.Fatal(rpc.FromWire(err))
		}
		chunk := []byte(strings.Repeat("x", 64<<10))
		sent := make(chan error, 1)
		go func() { // more than all buffers on the way take, so that reading and writing must overlap
			for i := range 20 {
				if _, err := agent.WriteExec(vm.Context(t), &guestv1.WriteExecRequest{ExecId: resp.GetExecId(), Data: chunk, Close: i == 19}); err != nil {
					sent <- err
					return
				}
			}
			sent <- nil
		}()
		stdout, _, code := m.Attend(t, resp.GetExecId()).Wait()
		if err := <-sent; err != nil {
			t.Error(rpc.FromWire(err))
		}
		if len(stdout) != len("/tmp\n")+20*len(chunk) || code != 0 {
			t.Errorf("%d bytes came back, code %d", len(stdout), code)
		}
		_, err = agent.WriteExec(vm.Context(t), &guestv1.WriteExecRequest{ExecId: resp.GetExecId(), Data: chunk})
		if err := rpc.FromWire(err); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("input after its end: %v", err)
		}
	})
	t.Run("the whole group dies", func(t *testing.T) {
		c := m.Begin(t, "sh", "-c", "sleep 1234 & sleep 1234 & echo started; wait")
		c.ReadUntil("started")
		if _, err := agent.CloseExec(vm.Context(t), &guestv1.CloseExecRequest{ExecId: c.ID}); err != nil {
			t.Fatal(rpc.FromWire(err))
		}
		m.Shell(t, "for i in $(seq 100); do grep -lz '[1]234' /proc/[0-9]*/cmdline 2>/dev/null | grep -v /proc/$$/ || exit 0; sleep 0.1; done; exit 1")
		if _, err := c.Read(); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("output of a closed command: %v", err)
		}
		if _, err := agent.CloseExec(vm.Context(t), &guestv1.CloseExecRequest{ExecId: c.ID}); err != nil {
			t.Errorf("closed again: %v", rpc.FromWire(err))
		}
	})
	t.Run("what is left in the background does not hold up the end", func(t *testing.T) {
		if stdout, _, code := m.Begin(t, "sh", "-c", "sleep 4321 & echo done").Wait(); stdout != "done\n" || code != 0 {
			t.Errorf("%q, %d", stdout, code)
		}
	})
	t.Run("orphans are collected", func(t *testing.T) {
		m.Shell(t, "for i in 1 2 3 4 5; do (sh -c 'sleep 0.05 &' &); done")
		m.Shell(t, "for i in $(seq 100); do grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | xargs -r grep -l 'PPid:.1$' || exit 0; sleep 0.1; done; exit 1")
	})
	t.Run("too many", func(t *testing.T) {
		var open []*vm.Command
		for range 100 {
			resp, err := agent.StartExec(vm.Context(t), &guestv1.StartExecRequest{Argv: []string{"sleep", "1000"}})
			if errors.Is(rpc.FromWire(err), errdefs.ErrResourceExhausted) {
				break
			}
			if err != nil {
				t.Fatal(rpc.FromWire(err))
			}
			open = append(open, m.Attend(t, resp.GetExecId()))
		}
		if len(open) == 100 {
			t.Error("there is no limit")
		}
		for _, c := range open {
			c.Close()
		}
		m.Run(t, "true")
	})
	for _, tc := range []struct {
		name string
		req  *guestv1.StartExecRequest
		kind error
	}{
		{"no such program", &guestv1.StartExecRequest{Argv: []string{"no-such-program"}}, errdefs.ErrNotFound},
		{"no such path", &guestv1.StartExecRequest{Argv: []string{"/no/such/program"}}, errdefs.ErrNotFound},
		{"not a program", &guestv1.StartExecRequest{Argv: []string{"/etc/passwd"}}, errdefs.ErrNotFound},
		{"no such directory", &guestv1.StartExecRequest{Argv: []string{"true"}, Cwd: "/no/such"}, errdefs.ErrNotFound},
		{"no command", &guestv1.StartExecRequest{}, errdefs.ErrInvalidArgument},
		{"an odd environment", &guestv1.StartExecRequest{Argv: []string{"true"}, Env: []string{"X"}}, errdefs.ErrInvalidArgument},
		{"a relative directory", &guestv1.StartExecRequest{Argv: []string{"true"}, Cwd: "tmp"}, errdefs.ErrInvalidArgument},
	} {
		if _, err := agent.StartExec(vm.Context(t), tc.req); !errors.Is(rpc.FromWire(err), tc.kind) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	_, err := agent.ReadExec(vm.Context(t), &guestv1.ReadExecRequest{ExecId: "1", Wait: durationpb.New(time.Hour)})
	if !errors.Is(rpc.FromWire(err), errdefs.ErrInvalidArgument) {
		t.Errorf("to wait for an hour: %v", err)
	}
}
