package containerdshim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/qemu/image"
	"crust.dev/crust/runtimehandler/sandbox"
)

// pod is the microVM of a pod.
type pod struct {
	*sandbox.Sandbox
	config Config
	cancel context.CancelFunc
	ended  chan struct{} // closed when nothing of it is left
	err    error         // how it ended; valid after ended
}

// bootPod boots the microVM of a pod and returns when it has registered with crustd. The machine outlives ctx.
func bootPod(ctx context.Context, c Config, id, cgroup string, log *slog.Logger) (*pod, error) {
	guest, err := image.Load(c.Image)
	if err != nil {
		return nil, err
	}
	accel, err := qemu.ProbeAccel(ctx, qemu.Probe{Want: c.Accel, Image: guest, Cache: c.AccelCache, Log: log})
	if err != nil {
		return nil, err
	}
	endpoint, err := rpc.ParseEndpoint(c.RuntimeEndpoint)
	if err != nil {
		return nil, err
	}
	box, err := sandbox.New(sandbox.Config{
		ID: id, Root: c.Sandboxes, RuntimeSocket: endpoint, Log: log,
		VM: qemu.Config{Image: guest, Accel: accel, MemoryMiB: c.MemoryMiB, CPUs: c.CPUs},
	})
	if err != nil {
		return nil, err
	}
	group, err := enterGroup(cgroup)
	if err != nil {
		return nil, err
	}
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &pod{Sandbox: box, config: c, cancel: cancel, ended: make(chan struct{})}
	ready := make(chan struct{})
	go func() {
		p.err = errors.Join(box.Run(runCtx, func(sandbox.Info) { close(ready) }), group.leave())
		close(p.ended)
	}()
	select {
	case <-ready:
		return p, nil
	case <-p.ended:
		cancel()
		return nil, p.err
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), p.stop())
	}
}

// stop has the guest unmount everything, ends the machine and gives the volumes back. What the error says was not done in
// order; the machine has ended in any case.
func (p *pod) stop() error {
	p.cancel()
	<-p.ended
	return p.err
}

// group is the control group of the pod's sandbox container on the host. The shim is in it, and so is the machine: what
// they use is counted as the pod's, and the kubelet's cAdvisor finds the pod by it.
type group struct{ remove func() error }

// enterGroup makes the control group of a specification and moves this process into it, so that the machine is born there.
// A path of systemd's form (slice:prefix:name) is left to containerd, which has put the shim into a group already.
func enterGroup(path string) (group, error) {
	none := group{remove: func() error { return nil }}
	if path == "" || path[0] != '/' {
		return none, nil
	}
	pid := os.Getpid()
	if cgroups.Mode() == cgroups.Unified {
		g, err := cgroup2.NewManager("/sys/fs/cgroup", path, &cgroup2.Resources{})
		if err == nil {
			err = g.AddProc(uint64(pid))
		}
		if err != nil {
			return none, fmt.Errorf("control group %s: %w", path, err)
		}
		return group{remove: func() error {
			root, err := cgroup2.Load("/")
			if err == nil {
				err = root.AddProc(uint64(pid))
			}
			return errors.Join(err, g.Delete())
		}}, nil
	}
	g, err := cgroup1.New(cgroup1.StaticPath(path), &specs.LinuxResources{})
	if err == nil {
		err = g.Add(cgroup1.Process{Pid: pid})
	}
	if err != nil {
		return none, fmt.Errorf("control group %s: %w", path, err)
	}
	return group{remove: func() error {
		root, err := cgroup1.Load(cgroup1.RootPath)
		if err == nil {
			err = g.MoveTo(root)
		}
		return errors.Join(err, g.Delete())
	}}, nil
}

// leave moves this process out of the group and removes it.
func (g group) leave() error {
	if err := g.remove(); err != nil {
		return fmt.Errorf("leave control group: %w", err)
	}
	return nil
}
