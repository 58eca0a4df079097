package csiplugin_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// daemon stands in for crustd: it says which volumes it has frozen, and notes in which order it was called.
type daemon struct {
	runtimev1.UnsafeConsistencyServer
	mu      sync.Mutex
	events  []string // this and what follows only with mu: it is called by other goroutines
	refuse  error
	tooLate bool
}

// note appends an event, and returns how the daemon is to behave.
func (d *daemon) note(format string, args ...any) (refuse error, tooLate bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events = append(d.events, fmt.Sprintf(format, args...))
	return d.refuse, d.tooLate
}

// behave forgets all events, and says how the daemon is to behave from now on.
func (d *daemon) behave(refuse error, tooLate bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.events, d.refuse, d.tooLate = nil, refuse, tooLate
}

// noted are the events since then.
func (d *daemon) noted() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.events)
}

func (d *daemon) FreezeVolumes(_ context.Context, req *runtimev1.FreezeVolumesRequest) (*runtimev1.FreezeVolumesResponse, error) {
	limit := req.GetTimeLimit().AsDuration()
	refuse, _ := d.note("freeze %d of %s, limited %t", len(req.GetVolumeIds()), req.GetDriver(), limit > 0 && limit <= time.Minute)
	return &runtimev1.FreezeVolumesResponse{Frozen: req.GetVolumeIds()}, refuse
}

func (d *daemon) ThawVolumes(_ context.Context, req *runtimev1.ThawVolumesRequest) (*runtimev1.ThawVolumesResponse, error) {
	if _, tooLate := d.note("thaw %d", len(req.GetVolumeIds())); tooLate {
		return nil, fmt.Errorf("it has thawed by itself: %w", errdefs.ErrFailedPrecondition)
	}
	return &runtimev1.ThawVolumesResponse{}, nil
}

// newHostWithDaemon starts a plugin and a daemon that it asks; what is cut is noted among the daemon's events.
func newHostWithDaemon(t *testing.T) (*host, *daemon) {
	t.Helper()
	h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
	d := &daemon{}
	h.cfg.Crustd = "unix://" + h.path("crustd.sock")
	h.watch = func(ctx context.Context) context.Context {
		return crashpoint.With(ctx, func(place string) {
			if place == "snapshot cut" {
				d.note("cut")
			}
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	l, err := rpc.Listen(ctx, h.path("crustd.sock"))
	must(t, err)
	server := rpc.NewServer(ctx, slog.New(slog.DiscardHandler))
	runtimev1.RegisterConsistencyServer(server, d)
	done := make(chan error, 1)
	go func() { done <- rpc.ServeGRPC(ctx, server, l, time.Second) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	h.start()
	return h, d
}

// sandboxed makes a volume that is published to a sandbox.
func (h *host) sandboxed(name string) *volume {
	h.t.Helper()
	v := h.create(name, mounted("ext4"), nil)
	must(h.t, v.stage())
	_, err := v.deferTo("t-"+name, false)
	must(h.t, err)
	write(h.t, v.file(), []byte(name), mib)
	return v
}

func (v *volume) giveBack(name string) {
	v.t.Helper()
	must(v.t, v.undefer("t-"+name, false), v.unstage())
}

var filesystemConsistent = map[string]string{csiplugin.ParameterConsistency: "filesystem"}

func TestAFilesystemConsistentSnapshot(t *testing.T) {
	h, d := newHostWithDaemon(t)
	v := h.sandboxed("v")
	req := &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id, Parameters: filesystemConsistent}
	d.behave(fmt.Errorf("the sandbox does not answer: %w", errdefs.ErrUnavailable), false)
	_, err := h.control.CreateSnapshot(h.call(), req)
	wantCode(t, err, codes.Unavailable, "does not answer", v.id)
	d.behave(nil, true)
	_, err = h.control.CreateSnapshot(h.call(), req)
	wantCode(t, err, codes.Unavailable, "thawed")
	if got := h.objects(); len(got) != 1 {
		t.Errorf("a snapshot that is not consistent was kept: %v", got)
	}
	d.behave(nil, false)
	_, err = h.control.CreateSnapshot(h.call(), req)
	must(t, err)
	_, err = h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "crash", SourceVolumeId: v.id})
	must(t, err)
	if want := []string{"freeze 1 of csi.crust.dev, limited true", "cut", "thaw 1", "cut"}; !slices.Equal(d.noted(), want) {
		t.Errorf("got %q, want %q", d.noted(), want)
	}
	v.giveBack("v")
}

// TestWhatADeadProcessLeftFrozenIsThawed kills the plugin between freezing and thawing.
func TestWhatADeadProcessLeftFrozenIsThawed(t *testing.T) {
	h, d := newHostWithDaemon(t)
	v, w := h.sandboxed("v"), h.sandboxed("w")
	for name, c := range map[string]struct {
		method string
		call   func() error
		thawed int
	}{
		"snapshot": {csi.Controller_CreateSnapshot_FullMethodName, func() error {
			_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id, Parameters: filesystemConsistent})
			return err
		}, 1},
		"group snapshot": {csi.GroupController_CreateVolumeGroupSnapshot_FullMethodName, func() error {
			_, err := h.groupSnapshot("g", v.id, w.id)
			return err
		}, 2},
	} {
		h.stop()
		end := h.startChild(c.method, 1)
		wantCode(t, c.call(), codes.Unavailable)
		if place := end(); place != "filesystems frozen" {
			t.Fatalf("%s: killed at %q", name, place)
		}
		d.behave(nil, false)
		h.start()
		if events := d.noted(); len(events) != c.thawed || events[0] != "thaw 1" {
			t.Errorf("%s: got %q, want %d thawed", name, events, c.thawed)
		}
		must(t, c.call())
	}
	v.giveBack("v")
	w.giveBack("w")
}

// TestACloneOfASandboxedVolume clones while the sandbox has it.
func TestACloneOfASandboxedVolume(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.sandboxed("v")
	f, err := os.Open(v.file())
	must(t, err)
	clone := h.clone("clone", volumeSource(v.id), 0)
	if got := read(t, clone.file())[mib]; got != 'v' {
		t.Errorf("the clone has %q", got)
	}
	must(t, f.Close())
	v.giveBack("v")
}

func TestWithoutADaemonNothingIsCalledConsistent(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.sandboxed("v")
	_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id, Parameters: filesystemConsistent})
	wantCode(t, err, codes.FailedPrecondition, "--crustd-endpoint", v.id)
	w := h.sandboxed("w")
	_, err = h.groupSnapshot("g", v.id, w.id)
	wantCode(t, err, codes.FailedPrecondition, "--crustd-endpoint")
	if got := h.objects(); len(got) != 2 {
		t.Errorf("left are %v", got)
	}
	v.giveBack("v")
	w.giveBack("w")
}

func TestAGroupSnapshot(t *testing.T) {
	h, d := newHostWithDaemon(t)
	a, b, rest := h.sandboxed("a"), h.sandboxed("b"), h.create("rest", block(), nil)
	g, err := h.groupSnapshot("g", b.id, rest.id, a.id)
	must(t, err)
	if want := []string{"freeze 2 of csi.crust.dev, limited true", "cut", "cut", "cut", "thaw 2"}; !slices.Equal(d.noted(), want) {
		t.Errorf("got %q, want %q", d.noted(), want)
	}
	var ids []string
	for _, s := range g.GetSnapshots() {
		ids = append(ids, s.GetSnapshotId())
		if s.GetGroupSnapshotId() != g.GetGroupSnapshotId() || !s.GetReadyToUse() || !s.GetCreationTime().AsTime().Equal(g.GetCreationTime().AsTime()) {
			t.Errorf("member %v", s)
		}
	}
	again, err := h.groupSnapshot("g", a.id, b.id, rest.id)
	if err != nil || !proto.Equal(again, g) || !g.GetReadyToUse() || len(ids) != 3 {
		t.Errorf("again: %v, %v, want %v", again, err, g)
	}
	got, err := h.group.GetVolumeGroupSnapshot(h.call(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: ids})
	if err != nil || !proto.Equal(got.GetGroupSnapshot(), g) {
		t.Errorf("got %v, %v", got, err)
	}
	if restored := h.clone("restored", snapshotSource(ids[0]), 0); restored.size == 0 {
		t.Error("a member cannot be restored")
	}
	_, err = h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: ids[0]})
	wantCode(t, err, codes.InvalidArgument, g.GetGroupSnapshotId())
	_, err = h.group.DeleteVolumeGroupSnapshot(h.call(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: ids[:2]})
	wantCode(t, err, codes.InvalidArgument, "snapshot_ids")
	for range 2 {
		_, err = h.group.DeleteVolumeGroupSnapshot(h.call(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: ids})
		must(t, err)
	}
	_, err = h.group.GetVolumeGroupSnapshot(h.call(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	wantCode(t, err, codes.NotFound)
	a.giveBack("a")
	b.giveBack("b")
	h.deleteAll()
	if got := h.objects(); len(got) > 0 {
		t.Errorf("left are %v", got)
	}
}

func TestAGroupSnapshotThatCannotBeHad(t *testing.T) {
	h := newHost(t, "xfs")
	a, b, c := h.create("a", mounted("ext4"), nil), h.create("b", mounted("ext4"), nil), h.create("c", block(), nil)
	none := handle.NewVolume(handle.Pool(h.poolID())).String()
	_, err := h.groupSnapshot("g", a.id, b.id)
	must(t, err)
	before := len(h.objects())
	for name, c := range map[string]struct {
		name    string
		volumes []string
		want    codes.Code
		text    string
	}{
		"no name":               {"", []string{a.id}, codes.InvalidArgument, "name"},
		"no volumes":            {"n", nil, codes.InvalidArgument, "source_volume_ids"},
		"one twice":             {"n", []string{a.id, a.id}, codes.InvalidArgument, "twice"},
		"one that never was":    {"n", []string{a.id, none}, codes.NotFound, none},
		"other volumes":         {"g", []string{a.id}, codes.AlreadyExists, b.id},
		"another pool's volume": {"n", []string{handle.NewVolume("ffffffffffff").String()}, codes.NotFound, "ffffffffffff"},
		"volumes of two pools":  {"n", []string{a.id, handle.NewVolume("ffffffffffff").String()}, codes.FailedPrecondition, "ffffffffffff"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.groupSnapshot(c.name, c.volumes...)
			wantCode(t, err, c.want, c.text)
		})
	}
	// One writer needs nobody to be held still, two do.
	must(t, a.stage(), a.publish("a"))
	_, err = h.groupSnapshot("one", a.id, b.id)
	must(t, err, c.stage(), c.publish("c"))
	_, err = h.groupSnapshot("two", a.id, c.id)
	wantCode(t, err, codes.FailedPrecondition, a.id, c.id, "host")
	// A member whose data is gone fails all.
	must(t, a.unpublish("a"), a.unstage(), c.unpublish("c"), c.unstage(), os.Rename(b.file(), filepath.Join(h.pool, "away")))
	_, err = h.groupSnapshot("gone", a.id, b.id)
	wantCode(t, err, codes.DataLoss, b.id)
	if got := h.objects(); len(got) != before+2-1 {
		t.Errorf("what failed has left something: %v", got)
	}
}

func TestModifyVolume(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	modify := func(parameters map[string]string) error {
		_, err := h.control.ControllerModifyVolume(h.call(), &csi.ControllerModifyVolumeRequest{VolumeId: v.id, MutableParameters: parameters})
		return err
	}
	wantCode(t, modify(map[string]string{"a": "b"}), codes.InvalidArgument, csiplugin.ParameterDiscard)
	wantCode(t, modify(map[string]string{csiplugin.ParameterDiscard: "b"}), codes.InvalidArgument, "online")
	must(t, modify(map[string]string{csiplugin.ParameterDiscard: "online"}), modify(nil))
	must(t, v.stage())
	fs, err := v.deferTo("t", false)
	if err != nil || !slices.Equal(fs.GetMountFlags(), []string{"discard"}) {
		t.Errorf("got %v, %v", fs, err)
	}
	// It counts from the next publish on: a repeated one answers what it answered.
	must(t, modify(map[string]string{csiplugin.ParameterDiscard: "none"}))
	again, err := v.deferTo("t", false)
	if err != nil || !proto.Equal(again, fs) {
		t.Errorf("got %v, %v, want %v", again, err, fs)
	}
	must(t, v.undefer("t", true))
	if fs, err = v.deferTo("t", false); err != nil || len(fs.GetMountFlags()) > 0 {
		t.Errorf("got %v, %v", fs, err)
	}
	must(t, v.undefer("t", true), modify(map[string]string{csiplugin.ParameterDiscard: "online"}), v.publish("h"))
	big := h.path("h/big")
	must(t, os.WriteFile(big, make([]byte, 8*mib), 0o600))
	scratch.Run(t, "sync", "-f", big)
	full := allocated(t, v.file())
	must(t, os.Remove(big))
	scratch.Run(t, "sync", "-f", h.path("h"))
	if left := allocated(t, v.file()); left > full-6*mib {
		t.Errorf("of %d bytes %d are left after a file of 8 MiB was removed", full, left)
	}
	must(t, v.unpublish("h"), v.unstage(), v.delete())
}

func allocated(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	return st.Blocks * 512
}

func TestVolumeHealthIsListed(t *testing.T) {
	h := newHost(t, "xfs")
	good, bad, worse := h.create("good", mounted("ext4"), nil), h.create("bad", mounted("ext4"), nil), h.create("worse", mounted("ext4"), nil)
	must(t, os.Truncate(bad.file(), mib), os.Remove(worse.file()))
	found := map[string]bool{}
	token := ""
	for {
		resp, err := h.control.ControllerListVolumeHealth(h.call(), &csi.ControllerListVolumeHealthRequest{MaxEntries: 1, StartingToken: token})
		must(t, err)
		for _, entry := range resp.GetEntries() {
			found[entry.GetVolumeId()] = true
			if s := entry.GetHealthStatuses(); len(s) != 1 || s[0].GetStatus() != csi.VolumeHealthErrorType_DATA_LOSS {
				t.Errorf("got %v", entry)
			}
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if len(found) != 2 || !found[bad.id] || !found[worse.id] {
		t.Errorf("listed are %v", found)
	}
	resp, err := h.control.ControllerGetVolumeHealth(h.call(), &csi.ControllerGetVolumeHealthRequest{VolumeId: good.id})
	if err != nil || len(resp.GetVolumeHealth().GetHealthStatuses()) > 0 {
		t.Errorf("got %v, %v", resp, err)
	}
	pool, err := h.node.NodeGetStorageHealth(h.call(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(pool.GetBackendHealth()) > 0 {
		t.Errorf("got %v, %v", pool, err)
	}
	_, err = h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: worse.id})
	wantCode(t, err, codes.DataLoss)
}
