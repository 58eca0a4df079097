package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
	corev1 "k8s.io/api/core/v1"

	"crust.dev/crust/runtimehandler/sandbox"
)

// restarts kills the kubelet, the daemon and the driver, each while a pod starts, while its volume grows, and while it ends.
func restarts(s *space) {
	s.claim("data", "256Mi")
	size, lines := 256, 0
	for _, victim := range []*Process{s.Kubelet, s.Daemon, s.Driver} {
		for _, delay := range []time.Duration{0, 2 * time.Second} {
			crash := func(what string) {
				s.t.Helper()
				time.Sleep(delay)
				s.t.Logf("%s is killed %v after %s", victim.Name, delay, what)
				victim.Kill()
				must(s.t, victim.Start())
			}
			s.pod("app", microVM, "data")
			crash("a pod was made")
			s.running("app")
			s.sh("app", "echo line >> /data/log; sync")
			lines++
			size += 32
			s.kubectl("patch", "pvc", "data", "--patch", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"%dMi"}}}}`, size))
			crash("a volume began to grow")
			s.kubectl("wait", "pvc/data", fmt.Sprintf("--for=jsonpath={.status.capacity.storage}=%dMi", size), "--timeout=4m")
			eventually(s.t, "the kubelet lets people in again", func(ctx context.Context) error {
				out, err := s.Kubectl(ctx, "--namespace", s.name, "exec", "app", "--", "/bin/sh", "-c", "wc -l < /data/log; df -m /data | tail -1").CombinedOutput()
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				fields := strings.Fields(string(out))
				if len(fields) < 3 || fields[0] != fmt.Sprint(lines) {
					return fmt.Errorf("the pod says %q, want %d lines", out, lines)
				}
				return nil
			})
			s.kubectl("delete", "pod", "app", "--wait=false")
			crash("a pod was deleted")
			s.kubectl("wait", "pod/app", "--for=delete", "--timeout=4m")
		}
	}
	if types := s.hostMounts("data"); len(types) > 0 {
		s.t.Errorf("left mounted: %v", types)
	}
}

// copies kills the daemon, the driver, and both sidecars that make volumes and snapshots, each while a filesystem is frozen and cut,
// and while volumes are made from the snapshot and from the volume itself. All copies are what the volume was.
func copies(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	want := ""
	for i, victim := range []*Process{s.Daemon, s.Driver, s.Snapshotter, s.Provisioner} {
		crash := func(what string) {
			s.t.Helper()
			s.t.Logf("%s is killed after %s", victim.Name, what)
			victim.Kill()
			if !victim.keep {
				must(s.t, victim.Start())
			}
		}
		want += victim.Name + "\n"
		s.sh("app", "echo "+victim.Name+" >> /data/log") // and no sync
		cut, restored, cloned := fmt.Sprintf("cut-%d", i), fmt.Sprintf("restored-%d", i), fmt.Sprintf("cloned-%d", i)
		s.cut(cut, "data", "crust-filesystem")
		crash("a snapshot was asked for")
		s.ready(cut)
		s.sh("app", "sync")
		s.claim(restored, "256Mi", from("VolumeSnapshot", cut))
		s.claim(cloned, "256Mi", from("PersistentVolumeClaim", "data"))
		s.pod(restored, onHost, restored)
		s.pod(cloned, onHost, cloned)
		crash("copies were asked for")
		for _, pod := range []string{restored, cloned} {
			s.running(pod)
			if got := s.sh(pod, "cat /data/log"); got != strings.TrimSpace(want) {
				s.t.Errorf("%s has %q, want %q", pod, got, want)
			}
			s.kubectl("delete", "pod", pod, "--wait=false")
		}
	}
}

// aKilledMachine: the shim is killed under a pod, which comes back with its data.
func aKilledMachine(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "echo kept > /data/f; sync")
	for _, m := range s.machines() {
		must(s.t, syscall.Kill(m.PID, syscall.SIGKILL))
	}
	eventually(s.t, "the container is started again", func(context.Context) error {
		if n := s.running("app").Status.ContainerStatuses[0].RestartCount; n == 0 {
			return errors.New("it was not")
		}
		return nil
	})
	if got := s.sh("app", "cat /data/f"); got != "kept" {
		s.t.Errorf("%q", got)
	}
}

// machines are the microVMs of the node that run.
func (s *space) machines() []sandbox.Info {
	s.t.Helper()
	entries, err := os.ReadDir(s.sandboxes)
	must(s.t, err)
	var list []sandbox.Info
	for _, e := range entries {
		if info, err := sandbox.Read(s.sandboxes, e.Name()); err == nil && info.Alive {
			list = append(list, info)
		}
	}
	return list
}

// reboot ends the node without a word to anybody, as a loss of power does: all processes, all mounts, and what is in memory.
// It comes back with its pods and their data.
func reboot(s *space) {
	s.claim("data", "256Mi")
	s.claim("host", "256Mi")
	forever := func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyAlways }
	s.pod("app", microVM, "data", forever)
	s.pod("plain", onHost, "host", forever)
	for _, name := range []string{"app", "plain"} {
		s.running(name)
		s.sh(name, "echo kept > /data/f; sync")
	}
	must(s.t, s.powerOff())
	must(s.t, s.powerOn(step(s.t)))
	for _, name := range []string{"app", "plain"} {
		eventually(s.t, "pod "+name+" is started again", func(context.Context) error {
			if n := s.running(name).Status.ContainerStatuses[0].RestartCount; n == 0 {
				return errors.New("it was not")
			}
			return nil
		})
		if got := s.sh(name, "cat /data/f"); got != "kept" {
			s.t.Errorf("%s has %q", name, got)
		}
		s.gone(name)
	}
}

// powerOff kills what runs on the node, and removes what does not outlive a boot. Of the control plane nothing is touched: it is
// another machine as far as the node is concerned.
func (c *Cluster) powerOff() error {
	for _, p := range []*Process{c.Kubelet, c.Containerd, c.Daemon, c.Driver} {
		p.Kill()
	}
	family, err := c.shimsAndTheirs()
	if err != nil {
		return err
	}
	for _, pid := range family {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill %d: %w", pid, err)
		}
	}
	deadline := time.Now().Add(startTimeout)
	for err = c.unmountAll(); err != nil && time.Now().Before(deadline); err = c.unmountAll() {
		time.Sleep(100 * time.Millisecond) // until the last of the killed has gone
	}
	for _, volatile := range []string{"cd", "s", "containerd.sock", "csi.sock", "kep.sock", "runtime.sock", "admin.sock"} {
		err = errors.Join(err, os.RemoveAll(c.path(volatile)))
	}
	return err
}

// powerOn starts the node again.
func (c *Cluster) powerOn(ctx context.Context) error {
	for _, start := range []struct {
		process *Process
		socket  string
	}{{c.Driver, "csi.sock"}, {c.Daemon, "runtime.sock"}, {c.Containerd, "containerd.sock"}} {
		if err := start.process.Start(); err != nil {
			return err
		}
		if err := start.process.await(ctx, listens(c.path(start.socket))); err != nil {
			return err
		}
	}
	return c.Kubelet.Start()
}

// shimsAndTheirs are the shims of the node's containerd and what they have started.
func (c *Cluster) shimsAndTheirs() ([]int, error) {
	all, err := procfs.AllProcs()
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	var family []int
	for _, p := range all {
		stat, err := p.Stat()
		argv, argvErr := p.CmdLine()
		if errors.Join(err, argvErr) != nil {
			continue // it has just ended
		}
		children[stat.PPID] = append(children[stat.PPID], p.PID)
		if slices.Contains(argv, c.path("containerd.sock")) {
			family = append(family, p.PID)
		}
	}
	for i := 0; i < len(family); i++ {
		family = append(family, children[family[i]]...)
	}
	return family, nil
}
