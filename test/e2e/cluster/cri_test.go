package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"crust.dev/crust/protocol/rpc"
)

// criPod is a pod as the kubelet has containerd run it.
type criPod struct {
	e      *engine
	api    cri.RuntimeServiceClient
	id     string
	config *cri.PodSandboxConfig
}

// runPod runs a pod of the microVM runtime on the host's network.
func runPod(t testing.TB, e *engine, conn *grpc.ClientConn, name string) *criPod {
	t.Helper()
	p := newPod(t, e, conn, name, "crust")
	t.Cleanup(func() { p.end(t) })
	return p
}

// newPod is runPod for any runtime, and the pod is the caller's to end.
func newPod(t testing.TB, e *engine, conn *grpc.ClientConn, name, runtime string) *criPod {
	t.Helper()
	p := &criPod{e: e, api: cri.NewRuntimeServiceClient(conn), config: &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Uid: name, Namespace: "default"},
		LogDirectory: e.path("logs"),
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent:    "/crust-test-" + filepath.Base(e.Dir),
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER}},
		},
	}}
	resp, err := p.api.RunPodSandbox(step(t), &cri.RunPodSandboxRequest{Config: p.config, RuntimeHandler: runtime})
	must(t, err)
	p.id = resp.GetPodSandboxId()
	return p
}

// end stops and removes the pod; it may be stopped already.
func (p *criPod) end(t testing.TB) {
	t.Helper()
	if _, err := p.api.StopPodSandbox(step(t), &cri.StopPodSandboxRequest{PodSandboxId: p.id}); err != nil {
		t.Error(err)
	}
	if _, err := p.api.RemovePodSandbox(step(t), &cri.RemovePodSandboxRequest{PodSandboxId: p.id}); err != nil {
		t.Error(err)
	}
}

// start starts a shell script in a container of the pod.
func (p *criPod) start(t testing.TB, name, script string, mounts ...*cri.Mount) string {
	t.Helper()
	created, err := p.api.CreateContainer(step(t), &cri.CreateContainerRequest{PodSandboxId: p.id, SandboxConfig: p.config, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: Image}, Command: []string{"/bin/sh", "-c", script},
		Envs: []*cri.KeyValue{{Key: "NAME", Value: []byte(name)}}, LogPath: name + ".log", Mounts: mounts,
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: p.config.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
	}})
	must(t, err)
	_, err = p.api.StartContainer(step(t), &cri.StartContainerRequest{ContainerId: created.GetContainerId()})
	must(t, err)
	return created.GetContainerId()
}

// exit waits until a container has ended, and returns its exit code and its log.
func (p *criPod) exit(t *testing.T, id string) (code int32, log string) {
	t.Helper()
	for ctx := step(t); ; {
		resp, err := p.api.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
		must(t, err)
		if s := resp.GetStatus(); s.GetState() == cri.ContainerState_CONTAINER_EXITED {
			raw, err := os.ReadFile(s.GetLogPath())
			must(t, err)
			return s.GetExitCode(), string(raw)
		}
		select {
		case <-ctx.Done():
			t.Fatalf("container %s does not end", id)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (p *criPod) exec(t *testing.T, id, script string) (stdout string, code int32) {
	t.Helper()
	resp, err := p.api.ExecSync(step(t), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/sh", "-c", script}, Timeout: 120})
	must(t, err)
	return string(resp.GetStdout()), resp.GetExitCode()
}

// TestCRI makes the calls that the kubelet makes, to containerd's own CRI plugin.
func TestCRI(t *testing.T) {
	e := startEngine(t)
	v := e.node.Volume("data", "ext4")
	must(t, v.Create(step(t), 256<<20))
	must(t, v.Stage(step(t)))
	must(t, v.Publish(step(t), "pod-1"))
	conn, err := rpc.Dial(e.path("containerd.sock"))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() }) // after the pods' ends
	data := &cri.Mount{HostPath: v.Target(), ContainerPath: "/data"}
	scratch := filepath.Join(e.Dir, "pods/0a/volumes/kubernetes.io~empty-dir/scratch")
	token := filepath.Join(e.Dir, "pods/0a/volumes/kubernetes.io~projected/token")
	for _, dir := range []string{scratch, token} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	must(t, os.WriteFile(filepath.Join(token, "token"), []byte("not so secret"), 0o600))
	shared := &cri.Mount{HostPath: scratch, ContainerPath: "/scratch"}

	pod := runPod(t, e, conn, "first")
	t.Run("an init container, then two that share a volume", func(t *testing.T) {
		code, log := pod.exit(t, pod.start(t, "init", "echo from $NAME; echo init > /data/init; echo s > /scratch/s; exit 0", data, shared))
		if code != 0 || !strings.Contains(log, "stdout F from init") {
			t.Errorf("%d, %q", code, log)
		}
		one := pod.start(t, "one", "trap 'echo ended; exit 5' TERM; while :; do sleep 0.1; done", data, shared)
		two := pod.start(t, "two", "sleep 3600", data, shared, &cri.Mount{HostPath: token, ContainerPath: "/token", Readonly: true})
		if out, code := pod.exec(t, one, "cat /data/init /scratch/s; echo one > /data/one; exit 3"); out != "init\ns\n" || code != 3 {
			t.Errorf("%q, %d", out, code)
		}
		if out, code := pod.exec(t, two, "cat /data/one /token/token; echo > /token/token"); !strings.HasPrefix(out, "one\nnot so secret") || code == 0 {
			t.Errorf("%q, %d", out, code)
		}
		usage, err := v.Stats(step(t))
		if err != nil || usage.GetTotal() == 0 || usage.GetTotal() > 256<<20 {
			t.Errorf("the driver's statistics, from the guest: %v, %v", usage, err)
		}
		_, err = pod.api.StopContainer(step(t), &cri.StopContainerRequest{ContainerId: one, Timeout: 60})
		must(t, err)
		if code, log := pod.exit(t, one); code != 5 || !strings.Contains(log, "ended") {
			t.Errorf("stopped: %d, %q", code, log)
		}
		_, err = pod.api.RemoveContainer(step(t), &cri.RemoveContainerRequest{ContainerId: one})
		must(t, err)
		if code, log := pod.exit(t, pod.start(t, "one", "cat /data/one", data)); code != 0 || !strings.Contains(log, "stdout F one") {
			t.Errorf("started again: %d, %q", code, log)
		}
		if size, err := v.Expand(step(t), 384<<20); err != nil || size < 384<<20 {
			t.Errorf("grown: %d, %v", size, err)
		}
		if out, _ := pod.exec(t, two, "df -m /data | tail -n 1 | awk '{print ($2 > 300)}'"); out != "1\n" {
			t.Errorf("size in the guest: %q", out)
		}
	})
	t.Run("unpublishing waits for the machine's end, and the volume goes to the next pod", func(t *testing.T) {
		must(t, v.UnpublishRefused(step(t)))
		pod.end(t)
		must(t, v.Unpublish(step(t)))
		must(t, v.Publish(step(t), "pod-2"))
		next := runPod(t, e, conn, "second")
		if code, log := next.exit(t, next.start(t, "reader", "cat /data/init", &cri.Mount{HostPath: v.Target(), ContainerPath: "/data"})); code != 0 || !strings.Contains(log, "stdout F init") {
			t.Errorf("%d, %q", code, log)
		}
	})
}
