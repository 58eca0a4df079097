package crust_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/ttrpc"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/internal/sptest"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/remote"
	"crust.dev/crust/runtimehandler/shim"
	"crust.dev/crust/test/priv"
)

// node is a daemon with a driver behind it and a kubelet's directory before it.
type node struct {
	t      testing.TB
	dir    string
	driver *sptest.Driver
	config crust.Config
	log    *logBuffer

	watch      func(place string) // called at every step of a change; set before start
	stop       func()             // the daemon
	stopDriver func()
	conn       *grpc.ClientConn
}

// logBuffer is a log that several goroutines write.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// newNode starts both; change may alter the daemon's configuration before.
func newNode(t testing.TB, change ...func(*crust.Config)) *node {
	t.Helper()
	priv.Root(t)
	dir, err := os.MkdirTemp("", "crust-") // t.TempDir would be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, dir: dir, driver: sptest.New(t), log: &logBuffer{}}
	n.config = crust.Config{
		Drivers:         []crust.Driver{{Endpoint: "unix://" + n.path("csi.sock"), Upstream: "unix://" + n.path("sp.sock")}},
		RuntimeEndpoint: "unix://" + n.path("rt.sock"),
		KEPEndpoint:     "unix://" + n.path("kep.sock"),
		StateDir:        n.path("state"),
		DeviceRoots:     []string{n.driver.Dir, "/dev"},
		Handlers:        handlers(n.path("run")),
		ShimHandler:     remote.Name,
		DefaultHandler:  remote.Name,
		Log:             slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, change := range change {
		change(&n.config)
	}
	n.stopDriver = n.driver.Serve(t, n.path("sp.sock"))
	n.start()
	if n.conn, err = rpc.Dial(n.path("csi.sock")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = n.conn.Close()
		n.stop()
		n.stopDriver()
		if t.Failed() {
			t.Log(n.log)
		}
		n.unmount()
		_ = os.RemoveAll(dir)
	})
	return n
}

func (n *node) path(elem ...string) string { return filepath.Join(append([]string{n.dir}, elem...)...) }

// start runs the daemon and waits until it listens.
func (n *node) start() {
	n.t.Helper()
	daemon, err := crust.New(n.config)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(withWatch(context.Background(), n.watch))
	done := make(chan error, 1)
	go func() { done <- daemon.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			n.t.Errorf("daemon: %v", err)
		}
	})
	n.listening()
}

// listening waits until the daemon listens on all its sockets. They are opened one after the other.
func (n *node) listening() {
	n.t.Helper()
	eventually(n.t, "the daemon to listen", func() error {
		for _, socket := range []string{"csi.sock", "kep.sock"} {
			conn, err := net.Dial("unix", n.path(socket))
			if err != nil {
				return err
			}
			if err := conn.Close(); err != nil {
				return err
			}
		}
		return nil
	})
}

// unmount removes the seals that a test has left, so that its directory can go.
func (n *node) unmount() {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(n.dir))
	if err != nil {
		n.t.Error(err)
	}
	for _, m := range mounts {
		_ = syscall.Unmount(m.Mountpoint, syscall.MNT_DETACH)
	}
}

func (n *node) restart() {
	n.t.Helper()
	n.stop()
	n.start()
}

func (n *node) csi() csi.NodeClient { return csi.NewNodeClient(n.conn) }

// target makes the parent of a target path, as a kubelet does, and returns the path.
func (n *node) target(pod string) string {
	n.t.Helper()
	dir := n.path("pods", pod, "volumes", "kubernetes.io~csi", "pv")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		n.t.Fatal(err)
	}
	return filepath.Join(dir, "mount")
}

// publishRequest is for a volume that is to be deferred.
func publishRequest(volume, target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId:   volume,
		TargetPath: target,
		VolumeCapability: &csi.VolumeCapability{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
		},
		VolumeContext: map[string]string{deferred.ParameterDefer: "always"},
		Secrets:       map[string]string{"password": "hunter2"},
	}
}

// publish makes a volume and publishes it.
func (n *node) publish(volume, pod string) (target string) {
	n.t.Helper()
	n.driver.Volume(n.t, volume, 64<<20)
	target = n.target(pod)
	if _, err := n.csi().NodePublishVolume(n.t.Context(), publishRequest(volume, target)); err != nil {
		n.t.Fatal(err)
	}
	return target
}

func (n *node) unpublish(volume, target string) error {
	n.t.Helper()
	_, err := n.csi().NodeUnpublishVolume(n.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target})
	return err
}

// sandbox is a shim in the process of the test, with a guest that only counts.
type sandbox struct {
	runtimev1.TTRPCShimService // nil: what is not below is not called

	client *shim.Client
	mu     sync.Mutex
	size   int64 // of the device, as the guest sees it
	hang   bool
	fail   bool
}

func (s *sandbox) setFail(fail bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = fail
}

func (s *sandbox) deviceSize() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size
}

func fullSandbox(id, address string) shim.Sandbox {
	return shim.Sandbox{
		ID: id, Runtime: "test", Address: address, FSTypes: []string{"ext4", "xfs"},
		Capabilities: runtimehandler.Capabilities{Format: true, Check: true, Grow: true, Group: true, SubPath: true, Freeze: true},
	}
}

// sandbox starts a shim; change may take abilities from it.
func (n *node) sandbox(id string, change func(*shim.Sandbox)) *sandbox {
	n.t.Helper()
	return n.sandboxThat(id, nil, change)
}

// sandboxThat starts a shim that answers with service; nil: with the sandbox itself.
func (n *node) sandboxThat(id string, service runtimev1.TTRPCShimService, change func(*shim.Sandbox)) *sandbox {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	address := n.path(id + ".sock")
	l, err := rpc.Listen(ctx, address)
	if err != nil {
		n.t.Fatal(err)
	}
	s := &sandbox{}
	if service == nil {
		service = s
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	done := make(chan error, 1)
	go func() {
		done <- rpc.ServeTTRPC(ctx, l, log, func(_ context.Context, _ rpc.Peer, server *ttrpc.Server) {
			runtimev1.RegisterTTRPCShimService(server, service)
		})
	}()
	config := fullSandbox(id, address)
	if change != nil {
		change(&config)
	}
	connectCtx, connected := context.WithTimeout(ctx, 10*time.Second)
	defer connected()
	if s.client, err = shim.Connect(connectCtx, n.path("rt.sock"), config, log); err != nil {
		cancel()
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		s.client.Close()
		cancel()
		if err := <-done; err != nil {
			n.t.Error(err)
		}
	})
	return s
}

// mount does what a shim does with a container's mounts, but for the mounting.
func (s *sandbox) mount(ctx context.Context, sources ...string) ([]shim.Resolved, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var mounts []shim.Mount
	for _, source := range sources {
		mounts = append(mounts, shim.Mount{Type: "bind", Source: source, Destination: "/data"})
	}
	resolved, err := s.client.Resolve(ctx, mounts)
	if err != nil {
		return nil, err
	}
	for _, r := range resolved {
		s.mu.Lock()
		s.size = r.Deferral.SizeBytes
		s.mu.Unlock()
		if err := s.client.Bound(ctx, r.Deferral.TargetPath, nil); err != nil {
			return nil, err
		}
	}
	return resolved, nil
}

func (s *sandbox) wait(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

// GetVolumeStats says that a quarter of the device is used.
func (s *sandbox) GetVolumeStats(ctx context.Context, _ *runtimev1.GetVolumeStatsRequest) (*runtimev1.GetVolumeStatsResponse, error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	usage, condition := runtimehandler.StatsToProto(runtimehandler.Stats{
		Bytes:  runtimehandler.Usage{Total: s.size, Used: s.size / 4, Available: s.size / 2},
		Inodes: runtimehandler.Usage{Total: 100, Used: 1, Available: 99},
	})
	return &runtimev1.GetVolumeStatsResponse{Usage: usage, Condition: condition}, nil
}

// ExpandVolume believes what it is told.
func (s *sandbox) ExpandVolume(ctx context.Context, req *runtimev1.ExpandVolumeRequest) (*runtimev1.ExpandVolumeResponse, error) {
	if err := s.wait(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail {
		return nil, errors.New("the guest has failed")
	}
	s.size = max(s.size, req.GetRequiredBytes())
	return &runtimev1.ExpandVolumeResponse{DeviceBytes: s.size}, nil
}

// shimProcess is a shim in a process of its own, which can be killed. It holds the device open as a VMM would, in a
// second process if it is told to.
type shimProcess struct {
	cmd *exec.Cmd
	out *bufio.Scanner
	vmm int
}

const shimEnv = "CRUST_TEST_SHIM"

func TestMain(m *testing.M) {
	assist.Main()
	if text := os.Getenv(daemonEnv); text != "" {
		runDaemon(text)
	}
	if args := os.Getenv(shimEnv); args != "" {
		if err := runShim(strings.Split(args, ",")); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// runShim claims and "mounts" one volume, and then waits to be killed. args: runtime socket, sandbox id, target path,
// steps ("claim" or "bound").
func runShim(args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	endpoint, id, target, last := args[0], args[1], args[2], args[3]
	vmm := exec.Command("sleep", "600")
	if err := vmm.Start(); err != nil {
		return err
	}
	l, err := rpc.Listen(ctx, filepath.Join(filepath.Dir(endpoint), "process-"+id+".sock")) // nobody answers on it
	if err != nil {
		return err
	}
	defer l.Close()
	config := fullSandbox(id, l.Addr().String())
	config.VMMPID = vmm.Process.Pid
	client, err := shim.Connect(ctx, endpoint, config, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		return err
	}
	resolved, err := client.Resolve(ctx, []shim.Mount{{Source: target, Destination: "/data"}})
	if err != nil {
		return err
	}
	if last == "bound" {
		if err := client.Bound(ctx, resolved[0].Deferral.TargetPath, nil); err != nil {
			return err
		}
	}
	fmt.Println(vmm.Process.Pid)
	select {}
}

func (n *node) shimProcess(id, target, last string) *shimProcess {
	n.t.Helper()
	p := &shimProcess{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), shimEnv+"="+strings.Join([]string{n.path("rt.sock"), id, target, last}, ","))
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { p.killVMM(); p.kill() })
	p.out = bufio.NewScanner(out)
	p.out.Scan()
	if p.vmm, err = strconv.Atoi(p.out.Text()); err != nil {
		n.t.Fatalf("shim: %s", p.out.Text())
	}
	return p
}

func (p *shimProcess) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func (p *shimProcess) killVMM() {
	if proc, err := os.FindProcess(p.vmm); err == nil && p.vmm > 0 {
		_ = proc.Kill()
	}
}

// eventually waits until fn succeeds.
func eventually(t testing.TB, what string, fn func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// wantKind checks the kind and a part of the text of an error that came over the wire.
func wantKind(t testing.TB, err, kind error, text string) {
	t.Helper()
	if err = rpc.FromWire(err); !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want %v with %q", err, kind, text)
	}
}

func mkfifo(t testing.TB, path string) {
	t.Helper()
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
}

// openIn opens a file in another process, until the function that it returns is called.
func openIn(t testing.TB, path string) (stop func()) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "600")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	t.Cleanup(stop)
	return stop
}
