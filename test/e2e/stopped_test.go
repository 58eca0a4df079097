package e2e

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/test/halt"
	"crust.dev/crust/test/node"
)

// stats asks for a volume's stats with the patience of a person.
func stats(t *testing.T, v *node.Volume) error {
	c, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := v.Stats(c)
	return rpc.FromWire(err)
}

// gaveUp is whether a call ended because somebody did not answer, and not in any other way.
func gaveUp(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errdefs.ErrUnavailable)
}

// TestStopped stops each of the daemon's partners in turn, as a hang does. Only its own volumes suffer, and when it goes
// on, so do they.
func TestStopped(t *testing.T) {
	n := start(t)
	hung, well := published(t, n, "hung", "ext4", 64*mib), published(t, n, "well", "ext4", 64*mib)
	a := sandbox(t, n, "hung", node.Mount{Source: hung.Target(), Destination: "/data"})
	b := sandbox(t, n, "well", node.Mount{Source: well.Target(), Destination: "/data"})
	for name, pid := range map[string]int{"the guest": a.VMM, "the shim": a.Process.PID()} {
		t.Run(name, func(t *testing.T) {
			goOn := halt.Process(t, pid)
			if err := stats(t, hung); !gaveUp(err) {
				t.Errorf("stats of the stopped one: %v", err)
			}
			if err := hung.UnpublishRefused(ctx(t)); err != nil {
				t.Error(err)
			}
			if err := stats(t, well); err != nil {
				t.Errorf("stats of another: %v", err)
			}
			other := published(t, n, "while-stopped", "ext4", 64*mib)
			if err := errors.Join(other.Unpublish(ctx(t)), other.Unstage(ctx(t)), other.Delete(ctx(t))); err != nil {
				t.Error(err)
			}
			goOn()
			eventually(t, "the one that was stopped", func() error { return stats(t, hung) })
		})
	}
	t.Run("the driver", func(t *testing.T) {
		goOn := halt.Process(t, n.Driver.PID())
		for _, v := range []*node.Volume{hung, well} {
			if err := stats(t, v); err != nil {
				t.Errorf("stats of a mounted volume: %v", err)
			}
		}
		late := n.Volume("late", "ext4")
		c, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if err := rpc.FromWire(late.Create(c, 64*mib)); !gaveUp(err) {
			t.Errorf("creating a volume: %v", err)
		}
		goOn()
		eventually(t, "the driver", func() error { return late.Create(ctx(t), 64*mib) })
	})
	for _, s := range []*node.Sandbox{a, b} {
		must(t, s.Stop(ctx(t)))
	}
}

// TestKilled kills the daemon, the driver and a sandbox under a running pod.
func TestKilled(t *testing.T) {
	n := start(t)
	v := published(t, n, "v", "xfs", 300*mib)
	s := sandbox(t, n, "first", node.Mount{Source: v.Target(), Destination: "/data"})
	sh(t, s, "echo kept > /data/file && sync /data/file")
	t.Run("crustd", func(t *testing.T) {
		n.Daemon.Kill()
		sh(t, s, "echo meanwhile >> /data/file && sync /data/file")
		must(t, n.StartDaemon(ctx(t)))
		eventually(t, "stats", func() error { return stats(t, v) })
		if err := v.UnpublishRefused(ctx(t)); err != nil {
			t.Error(err)
		}
	})
	t.Run("crust-csi", func(t *testing.T) {
		n.Driver.Kill()
		must(t, stats(t, v))
		must(t, n.StartDriver(ctx(t)))
		if _, err := v.Expand(ctx(t), 400*mib); err != nil {
			t.Error(err)
		}
	})
	t.Run("crust-sandbox: its machine goes with it", func(t *testing.T) {
		s.Process.Kill()
		eventually(t, "the end of the machine", func() error {
			if err := syscall.Kill(s.VMM, 0); err == nil {
				return fmt.Errorf("process %d is there", s.VMM)
			}
			return nil
		})
	})
	t.Run("and the volume is free", func(t *testing.T) {
		eventually(t, "unpublish", func() error { return v.Unpublish(ctx(t)) })
		must(t, v.Publish(ctx(t), "second"))
		s := sandbox(t, n, "second", node.Mount{Source: v.Target(), Destination: "/data"})
		if got := sh(t, s, "cat /data/file"); got != "kept\nmeanwhile" {
			t.Errorf("the file has %q", got)
		}
		sh(t, s, "echo unheard >> /data/file")
		n.Daemon.Kill()
		// Less than the 90 s that a machine has for its own end: nobody may wait for crustd.
		patience, cancel := context.WithTimeout(ctx(t), time.Minute)
		defer cancel()
		must(t, s.Stop(patience))
		must(t, n.StartDaemon(ctx(t)))
	})
	t.Run("and what ended while crustd was away has ended", func(t *testing.T) {
		eventually(t, "unpublish", func() error { return v.Unpublish(ctx(t)) })
		must(t, v.Publish(ctx(t), "third"))
		s := sandbox(t, n, "third", node.Mount{Source: v.Target(), Destination: "/data"})
		if got := sh(t, s, "cat /data/file"); got != "kept\nmeanwhile\nunheard" {
			t.Errorf("the file has %q", got)
		}
		must(t, s.Stop(ctx(t)))
	})
}
