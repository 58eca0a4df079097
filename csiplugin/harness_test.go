package csiplugin_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/backing/convert"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/test/priv"
)

func TestMain(m *testing.M) {
	convert.Main()
	if os.Getenv(childVariable) != "" {
		runChild()
	}
	os.Exit(scratch.Main(m))
}

const (
	mib = 1 << 20
	gib = 1 << 30
)

// buffer is a log that several goroutines write.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// host is a node: a pool, a plugin that serves it, and a CO that calls the plugin over its socket.
type host struct {
	t        testing.TB
	dir      string // of everything but the pool
	pool     string
	cfg      csiplugin.Config
	log      *buffer
	boot     string
	watch    func(context.Context) context.Context
	stop     func()
	conn     *grpc.ClientConn
	identity csi.IdentityClient
	control  csi.ControllerClient
	node     csi.NodeClient
	group    csi.GroupControllerClient
}

// newHost starts a plugin with a new pool on a filesystem of fstype.
func newHost(t testing.TB, fstype string) *host {
	t.Helper()
	priv.Root(t)
	return newHostIn(t, filepath.Join(scratch.Filesystem(t, fstype, 2*gib), "pool"))
}

// newHostIn starts a plugin with a pool in a directory.
func newHostIn(t testing.TB, pool string) *host {
	t.Helper()
	h := prepareHost(t, pool)
	h.start()
	return h
}

func prepareHost(t testing.TB, pool string) *host {
	t.Helper()
	h := &host{t: t, dir: scratch.Dir(t), pool: pool, log: &buffer{}, stop: func() {}}
	h.cfg = csiplugin.Config{
		Endpoint: "unix://" + filepath.Join(h.dir, "csi.sock"), NodeID: "node-1", PoolDir: pool, Mode: csiplugin.ModeAll,
		DriverName: csiplugin.DefaultDriverName, Version: "test", Log: slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	t.Cleanup(func() {
		h.stop()
		if t.Failed() {
			t.Logf("the plugin's log:\n%s", h.log)
		}
	})
	return h
}

// plugin is one that has not run yet.
func (h *host) plugin() *csiplugin.Plugin {
	h.t.Helper()
	p, err := csiplugin.New(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	if h.boot != "" {
		p.SetBoot(h.boot)
	}
	if h.watch != nil {
		p.Watch(h.watch)
	}
	return p
}

// start runs the plugin in this process until stop is called.
func (h *host) start() {
	h.t.Helper()
	p := h.plugin()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	h.stop = func() {
		_ = h.conn.Close()
		cancel()
		if err := <-ended; err != nil {
			h.t.Errorf("Run: %v", err)
		}
		h.stop = func() {}
	}
	h.dial(ended)
}

// dial waits until the plugin listens, and connects the CO.
func (h *host) dial(ended chan error) {
	h.t.Helper()
	socket := filepath.Join(h.dir, "csi.sock")
	// A gRPC client that fails to connect would wait a second before it tries again.
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		probe, err := net.Dial("unix", socket)
		if err == nil {
			_ = probe.Close()
			break
		}
		select {
		case err := <-ended:
			ended <- nil
			h.t.Fatalf("Run: %v", err)
		default:
		}
		if time.Now().After(deadline) {
			h.t.Fatalf("the plugin does not listen: %v", err)
		}
	}
	conn, err := rpc.Dial(socket)
	if err != nil {
		h.t.Fatal(err)
	}
	h.conn = conn
	h.identity, h.control, h.node = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	h.group = csi.NewGroupControllerClient(conn)
}

// reboot stops the plugin, unmounts and detaches everything as a reboot would, and starts the plugin again.
func (h *host) reboot() {
	h.t.Helper()
	h.crash()
	h.boot = fmt.Sprintf("boot-%d", time.Now().UnixNano())
	h.start()
}

// crash stops the plugin and takes all mounts and devices of volumes away.
func (h *host) crash() {
	h.t.Helper()
	h.stop()
	mounts := h.mounts()
	for _, m := range slices.Backward(mounts) {
		scratch.Run(h.t, "umount", m)
	}
	for _, dev := range h.devices() {
		scratch.Run(h.t, "losetup", "--detach", dev)
	}
}

// mounts are the mount points under the host's directory, in the order in which they were mounted.
func (h *host) mounts() []string {
	h.t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		h.t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(table)) {
		if path := strings.Fields(line)[4]; strings.HasPrefix(path, h.dir+"/") {
			found = append(found, path)
		}
	}
	return found
}

// devices are the loop devices of volumes.
func (h *host) devices() []string {
	h.t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		h.t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		raw, err := os.ReadFile(file)
		// What it prints is relative to the filesystem's root in some kernels, so only the name counts.
		if err == nil && strings.HasPrefix(filepath.Base(strings.TrimSpace(string(raw))), h.poolID()) {
			found = append(found, "/dev/"+strings.Split(file, "/")[3])
		}
	}
	return found
}

func (h *host) poolID() string {
	raw, err := os.ReadFile(filepath.Join(h.root(), "pool.json"))
	if err != nil {
		h.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(raw), `"pool":"`)
	return rest[:12]
}

// root is where the pool's data is.
func (h *host) root() string {
	if _, err := os.Stat(filepath.Join(h.pool, "mnt")); err == nil {
		return filepath.Join(h.pool, "mnt")
	}
	return h.pool
}

// file is the file of a volume.
func (h *host) file(id string) string { return filepath.Join(h.root(), "objects", id) }

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

// capability builders.

func capability(mode csi.VolumeCapability_AccessMode_Mode, mount *csi.VolumeCapability_MountVolume) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if mount == nil {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: mount}
	}
	return c
}

const (
	writer      = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	onlyWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	reader      = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

func mounted(fstype string) *csi.VolumeCapability {
	return capability(multiWriter, &csi.VolumeCapability_MountVolume{FsType: fstype})
}

func block() *csi.VolumeCapability { return capability(multiWriter, nil) }

// call gives a call a deadline.
func (h *host) call() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	h.t.Cleanup(cancel)
	return ctx
}

// volume is one volume as a CO goes through its life.
type volume struct {
	*host
	id      string
	size    int64
	cap     *csi.VolumeCapability
	context map[string]string
	// snap and other are ids of other things that a test is about.
	snap, other string
}

// create makes a volume with one capability, as small as its filesystem can be.
func (h *host) create(name string, c *csi.VolumeCapability, parameters map[string]string) *volume {
	h.t.Helper()
	resp, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: parameters,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 16 * mib},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	v := resp.GetVolume()
	return &volume{host: h, id: v.GetVolumeId(), size: v.GetCapacityBytes(), cap: c, context: v.GetVolumeContext()}
}

func (v *volume) file() string { return v.host.file(v.id) }

func (v *volume) staging() string { return v.path("stage-" + v.id[len(v.id)-6:]) }

// stage makes the staging directory as a CO does, and stages.
func (v *volume) stage() error {
	v.t.Helper()
	if err := os.MkdirAll(v.staging(), 0o700); err != nil {
		v.t.Fatal(err)
	}
	_, err := v.node.NodeStageVolume(v.call(), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(), VolumeCapability: v.cap, VolumeContext: v.context,
	})
	return err
}

func (v *volume) unstage() error {
	_, err := v.node.NodeUnstageVolume(v.call(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging()})
	return err
}

func (v *volume) publishRequest(target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(), TargetPath: v.path(target),
		VolumeCapability: proto.CloneOf(v.cap), VolumeContext: v.context,
	}
}

func (v *volume) publish(target string) error {
	_, err := v.node.NodePublishVolume(v.call(), v.publishRequest(target))
	return err
}

func (v *volume) publishReadOnly(target string) error {
	req := v.publishRequest(target)
	req.Readonly = true
	_, err := v.node.NodePublishVolume(v.call(), req)
	return err
}

// deferTo publishes to a sandbox.
func (v *volume) deferTo(target string, readOnly bool) (*deferred.DeferredFilesystem, error) {
	req := v.publishRequest(target)
	req.Readonly = readOnly
	return v.deferRequest(req)
}

func (v *volume) deferRequest(req *csi.NodePublishVolumeRequest) (*deferred.DeferredFilesystem, error) {
	v.t.Helper()
	if err := deferred.Set(req, &deferred.NodePublishVolumeRequestExtension{DeferFsOps: true}); err != nil {
		v.t.Fatal(err)
	}
	resp, err := v.node.NodePublishVolume(v.call(), req)
	if err != nil {
		return nil, err
	}
	var ext deferred.NodePublishVolumeResponseExtension
	if err := deferred.Get(resp, &ext); err != nil {
		v.t.Fatal(err)
	}
	return ext.GetDeferredFilesystem(), ext.GetDeferredFilesystem().Validate()
}

func (v *volume) unpublish(target string) error {
	_, err := v.node.NodeUnpublishVolume(v.call(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.path(target)})
	return err
}

// undefer takes a volume back from a sandbox.
func (v *volume) undefer(target string, neverMounted bool) error {
	v.t.Helper()
	req := &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.path(target)}
	if err := deferred.Set(req, &deferred.NodeUnpublishVolumeRequestExtension{DeferFsOps: true, NeverMounted: neverMounted}); err != nil {
		v.t.Fatal(err)
	}
	_, err := v.node.NodeUnpublishVolume(v.call(), req)
	return err
}

func (v *volume) delete() error {
	_, err := v.control.DeleteVolume(v.call(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// must fails the test unless every step succeeded.
func must(t testing.TB, steps ...error) {
	t.Helper()
	for i, err := range steps {
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
}

// wantCode checks the code of a call, and that an error has a text that says what it must, and no details.
func wantCode(t testing.TB, err error, want codes.Code, texts ...string) {
	t.Helper()
	st := status.Convert(err)
	if st.Code() != want {
		t.Errorf("got %v (%v), want %v", st.Code(), err, want)
		return
	}
	if want != codes.OK && (st.Message() == "" || len(st.Details()) > 0) {
		t.Errorf("the status has the message %q and the details %v (CSI, Error Scheme)", st.Message(), st.Details())
	}
	for _, text := range texts {
		if !strings.Contains(st.Message(), text) {
			t.Errorf("the message %q does not name %q", st.Message(), text)
		}
	}
}

// write writes to a volume's file behind everybody's back.
func write(t testing.TB, path string, data []byte, offset int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(data, offset); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// blank reports whether a file reads as zeros. Holes are not read.
func blank(t testing.TB, path string) bool {
	t.Helper()
	zero := true
	eachExtent(t, path, func(_ int64, data []byte) { zero = zero && len(bytes.Trim(data, "\x00")) == 0 })
	return zero
}

// eachExtent calls f with the data of a file, in parts that begin or end where a hole is.
func eachExtent(t testing.TB, path string, f func(offset int64, data []byte)) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for offset := int64(0); ; {
		start, err := unix.Seek(int(file.Fd()), offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return
		}
		must(t, err)
		offset, err = unix.Seek(int(file.Fd()), start, unix.SEEK_HOLE)
		must(t, err)
		data := make([]byte, offset-start)
		_, err = file.ReadAt(data, start)
		must(t, err)
		f(start, data)
	}
}
