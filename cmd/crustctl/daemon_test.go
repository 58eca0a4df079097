package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"crust.dev/crust/crust"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/fake"
	"crust.dev/crust/runtimehandler/remote"
	"crust.dev/crust/test/priv"
)

// node is a real crustd, with a runtime in memory.
type node struct {
	t        *testing.T
	dir      string
	endpoint string
	runtime  *fake.Runtime
	target   string
	device   string
}

const mib = 1 << 20

func newNode(t *testing.T) *node {
	t.Helper()
	priv.Root(t)
	dir, err := os.MkdirTemp("", "ctl-") // t.TempDir would be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	all := runtimehandler.Capabilities{Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true, Freeze: true}
	n := &node{t: t, dir: dir, runtime: fake.New("vm", all), endpoint: "unix://" + dir + "/admin.sock"}
	n.device = filepath.Join(dir, "device")
	n.target = filepath.Join(dir, "pods/uid-1/volumes/kubernetes.io~csi/pv-1/mount")
	daemon, err := crust.New(crust.Config{
		Drivers:         []crust.Driver{{Endpoint: "unix://" + dir + "/csi.sock", Upstream: "unix://" + dir + "/none.sock"}},
		RuntimeEndpoint: "unix://" + dir + "/rt.sock", KEPEndpoint: "unix://" + dir + "/kep.sock", AdminEndpoint: n.endpoint,
		StateDir: filepath.Join(dir, "state"), Handlers: []runtimehandler.Handler{remote.Handler{}, n.runtime.Handler()},
		ShimHandler: remote.Name, DefaultHandler: "vm", Version: "test", Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- daemon.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("daemon: %v", err)
		}
		_ = unix.Unmount(n.target, unix.MNT_DETACH)
		_ = os.RemoveAll(dir)
	})
	return n
}

// publish publishes a volume as a driver that knows KEP-2857 does.
func (n *node) publish(size int64) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.target), 0o750); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(n.device, nil, 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Truncate(n.device, size); err != nil {
		n.t.Fatal(err)
	}
	conn, err := rpc.Dial(filepath.Join(n.dir, "kep.sock"))
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	_, err = runtimev1.NewRuntimeClient(conn).RuntimeStageVolume(n.t.Context(), &runtimev1.RuntimeStageVolumeRequest{
		VolumeType: runtimev1.VolumeType_VOLUME_TYPE_BLOCK, VolumeTargetPath: n.target, VolumeBackingPath: n.device, FsType: "ext4",
	}, grpc.WaitForReady(true))
	if err != nil {
		n.t.Fatal(err)
	}
}

// ctl runs crustctl and checks how it ends.
func (n *node) ctl(code int, args ...string) string {
	n.t.Helper()
	out, err := crustctl(n.endpoint, args...)
	if exitCode(err) != code {
		n.t.Fatalf("crustctl %s: exit code %d, want %d: %v\n%s", strings.Join(args, " "), exitCode(err), code, err, out)
	}
	return out
}

// field runs crustctl with JSON output and returns a value of it.
func (n *node) field(code int, path string, args ...string) any {
	n.t.Helper()
	out := n.ctl(code, append(args, "-o", "json")...)
	var value any
	if err := json.Unmarshal([]byte(out), &value); err != nil {
		n.t.Fatalf("%v\n%s", err, out)
	}
	for _, key := range strings.Split(path, ".") {
		if list, ok := value.([]any); ok && len(list) > 0 {
			value = list[0]
		}
		object, _ := value.(map[string]any)
		value = object[key]
	}
	return value
}

func (n *node) want(want any, path string, args ...string) {
	n.t.Helper()
	if got := n.field(0, path, args...); got != want {
		n.t.Errorf("crustctl %s: %s is %v, want %v", strings.Join(args, " "), path, got, want)
	}
}

// TestWithCrustd takes a volume of a real daemon through its life, as an operator sees it.
func TestWithCrustd(t *testing.T) {
	n := newNode(t)
	n.publish(64 * mib)
	n.want("test", "version", "status")

	// Nobody has mounted it yet.
	n.want("published", "deferrals.phase", "list")
	n.want(true, "sealed", "describe", n.target)
	n.want("published", "stats.phase", "stats")
	if got := n.field(1, "stats.error", "stats", n.target); !strings.Contains(got.(string), "no sandbox has mounted it yet") {
		t.Errorf("stats of a volume without a sandbox: %v", got)
	}
	n.want("no sandbox has it: its filesystem is grown to its device when the next one mounts it", "plan", "expand", n.target, "--dry-run")

	// A sandbox has.
	sandbox, err := n.runtime.Mount(n.target)
	if err != nil {
		t.Fatal(err)
	}
	n.want("67108864", "stats.stats.bytes.total", "stats")
	n.want("mounted", "deferrals.phase", "list")
	n.want(sandbox.ID, "deferral.sandbox.id", "describe", n.target)

	// Its device grows: a dry run changes nothing.
	if err := os.Truncate(n.device, 128*mib); err != nil {
		t.Fatal(err)
	}
	n.want("134217728", "device_bytes", "expand", n.target, "--dry-run")
	n.want("67108864", "stats.stats.bytes.total", "stats", n.target)
	n.want("67108864", "filesystem_bytes", "expand", n.target)
	n.want("134217728", "stats.stats.bytes.total", "stats", n.target)
	n.want("134217728", "deferrals.size_bytes", "list")

	// The sandbox hangs: that is one line and an exit code.
	n.runtime.Hang(n.target)
	if got := n.field(1, "stats.error", "stats"); !strings.Contains(got.(string), sandbox.ID) {
		t.Errorf("stats of a hung sandbox: %v", got)
	}
	n.want("mounted", "deferral.phase", "describe", n.target)

	// The sandbox and the pod go without a word: a dry run changes nothing.
	n.runtime.Unmount(n.target)
	if err := unix.Unmount(n.target, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(n.dir, "pods")); err != nil {
		t.Fatal(err)
	}
	if got := n.ctl(0, "gc", "--dry-run"); !strings.Contains(got, n.target) {
		t.Errorf("gc --dry-run:\n%s", got)
	}
	n.want(n.target, "deferrals.target_path", "list")
	n.ctl(0, "gc")
	if got := n.ctl(0, "list"); got != "No volume is deferred on this node.\n" {
		t.Errorf("list after gc:\n%s", got)
	}
	n.want(nil, "findings.kind", "gc")

	out := n.ctl(1, "doctor", "--kubelet-dir", n.dir)
	if !strings.Contains(out, "[error]   crustd: driver "+n.dir+"/none.sock") {
		t.Errorf("doctor:\n%s", out)
	}
}
