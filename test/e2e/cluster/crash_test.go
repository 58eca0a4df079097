package cluster

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/sandbox"
)

// slow is how long something may take that is not logged: whoever wonders where the minutes of a test have gone finds them.
const slow = 15 * time.Second

// eventually repeats something until it succeeds.
func eventually(t testing.TB, what string, try func(context.Context) error) {
	t.Helper()
	ctx, start := step(t), time.Now()
	var last error
	for err := try(ctx); err != nil; err = try(ctx) {
		last = err
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
	if took := time.Since(start); last != nil && took > slow {
		t.Logf("%v: %s; the last that was in the way: %v", took.Round(time.Second/10), what, last)
	}
}

// TestCrashes kills containerd, and then the shim, under a running pod.
func TestCrashes(t *testing.T) {
	e := startEngine(t)
	v := e.node.Volume("data", "ext4")
	must(t, v.Create(step(t), 256<<20))
	must(t, v.Stage(step(t)))
	must(t, v.Publish(step(t), "pod-1"))
	conn, err := rpc.Dial(e.path("containerd.sock"))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	pod := runPod(t, e, conn, "first")
	data := &cri.Mount{HostPath: v.Target(), ContainerPath: "/data"}
	id := pod.start(t, "main", "echo kept > /data/f; sync; i=0; while :; do i=$((i+1)); echo line $i; sleep 0.5; done", data)
	work := filepath.Join(e.path("containerd"), "io.containerd.runtime.v2.task/k8s.io", id)

	t.Run("nothing of the root filesystem is on the host while it is in use", func(t *testing.T) {
		if left, err := os.ReadDir(work); err != nil || len(left) > 0 {
			t.Errorf("%v, %v", left, err)
		}
		raw, err := os.ReadFile("/proc/self/mountinfo")
		must(t, err)
		if strings.Contains(string(raw), id) {
			t.Errorf("the host has it mounted:\n%s", raw)
		}
	})
	t.Run("containerd", func(t *testing.T) {
		e.Containerd.Kill()
		must(t, e.Containerd.Start())
		eventually(t, "containerd comes back", func(ctx context.Context) error {
			_, err := pod.api.Version(ctx, &cri.VersionRequest{})
			return err
		})
		if out, code := pod.exec(t, id, "cat /data/f"); out != "kept\n" || code != 0 {
			t.Errorf("%q, %d", out, code)
		}
	})
	t.Run("the shim", func(t *testing.T) {
		info, err := sandbox.Read(e.sandboxes, pod.id)
		must(t, err)
		must(t, syscall.Kill(info.PID, syscall.SIGKILL))
		eventually(t, "the machine dies with its shim", func(context.Context) error {
			if err := syscall.Kill(info.VMMPID, 0); err == nil {
				return syscall.EBUSY
			}
			return nil
		})
		// That is containerd's code for a container of which nobody can tell how it has ended.
		if code, _ := pod.exit(t, id); code != 255 {
			t.Errorf("exit code %d", code)
		}
		pod.end(t)
		eventually(t, "the volume is free", v.Unpublish)
		must(t, v.Publish(step(t), "pod-2"))
		next := runPod(t, e, conn, "second")
		code, log := next.exit(t, next.start(t, "reader", "cat /data/f", &cri.Mount{HostPath: v.Target(), ContainerPath: "/data"}))
		if code != 0 || !strings.Contains(log, "stdout F kept") {
			t.Errorf("%d, %q", code, log)
		}
	})
}
