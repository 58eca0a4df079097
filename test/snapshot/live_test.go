package snapshot

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/test/node"
	"crust.dev/crust/test/node/nodetest"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

const mib = 1 << 20

// bench is a node, and a CO's sidecars that talk to its driver.
type bench struct {
	*node.Node
	t    *testing.T
	conn *grpc.ClientConn
}

// newBench builds the commands and starts the services, the driver with the daemon's endpoint for freezing.
func newBench(t *testing.T) *bench {
	t.Helper()
	priv.Root(t)
	vm.Need(t)
	n, _ := nodetest.New(t, "crustd", "crust-csi", "crust-agent", "crust-sandbox")
	n.Accel = string(vm.Accel(t))
	kep := "unix://" + n.Path("kep.sock")
	n.DriverArgs = []string{"--crustd-endpoint", kep, "--pool-size", "4Gi"}
	n.DaemonArgs = []string{"--kep-endpoint", kep}
	b := &bench{Node: n, t: t}
	_, err := n.BuildImage(b.ctx())
	must(t, err, n.StartServices(b.ctx()))
	b.conn = nodetest.Dial(t, n)
	return b
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) ctx() context.Context { return nodetest.Context(b.t) }

func (b *bench) controller() csi.ControllerClient { return csi.NewControllerClient(b.conn) }

func (b *bench) sh(s *node.Sandbox, script string) string {
	b.t.Helper()
	out, err := s.Sh(b.ctx(), script)
	must(b.t, err)
	return strings.TrimSpace(out)
}

// number is what a script prints.
func (b *bench) number(s *node.Sandbox, script string) int {
	b.t.Helper()
	n, err := strconv.Atoi(b.sh(s, script))
	must(b.t, err)
	return n
}

func (b *bench) published(v *node.Volume) node.Mount {
	b.t.Helper()
	must(b.t, v.Stage(b.ctx()), v.Publish(b.ctx(), "pod-"+v.Name))
	return node.Mount{Source: v.Target(), Destination: "/mnt/" + v.Name}
}

func (b *bench) snapshot(name, volume, consistency string) string {
	b.t.Helper()
	resp, err := b.controller().CreateSnapshot(b.ctx(), &csi.CreateSnapshotRequest{
		Name: name, SourceVolumeId: volume, Parameters: map[string]string{csiplugin.ParameterConsistency: consistency},
	})
	must(b.t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

// restored is a volume that is made from a snapshot.
func (b *bench) restored(name, fsType, snapshot string, size int64) *node.Volume {
	b.t.Helper()
	v := b.Volume(name, fsType)
	req := &csi.CreateVolumeRequest{
		Name: name, Parameters: map[string]string{"crust.dev/defer": "always"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
		}},
		VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}}},
	}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	resp, err := b.controller().CreateVolume(b.ctx(), req)
	must(b.t, err)
	v.ID, v.Size, v.Context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetCapacityBytes(), resp.GetVolume().GetVolumeContext()
	return v
}

// writer numbers its writes, to one volume and then to the other, and has each written back before the next.
const writer = `i=0; while [ ! -e /mnt/a/stop ]; do i=$((i+1)); echo $i >> /mnt/a/log; sync; echo $i >> /mnt/b/log; sync; done`

// wholeLog fails unless the log has the lines 1 to the last in their order, and prints the last.
const wholeLog = `n=0; while read l; do n=$((n+1)); [ "$l" = $n ] || { echo "line $n is $l" >&2; exit 1; }; done < /mnt/%s/log; echo $n`

// TestSnapshotsOfALiveSandbox cuts snapshots while a sandbox writes numbered lines to two volumes, restores them beside
// their sources, and looks in another sandbox what they hold.
func TestSnapshotsOfALiveSandbox(t *testing.T) {
	b := newBench(t)
	one, two := b.Volume("a", "ext4"), b.Volume("b", "xfs")
	must(t, one.Create(b.ctx(), 64*mib), two.Create(b.ctx(), 320*mib))
	live, err := b.StartSandbox(b.ctx(), "live", b.published(one), b.published(two))
	must(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := live.Sh(b.ctx(), writer)
		ended <- err
	}()
	for deadline := time.Now().Add(time.Minute); b.number(live, "cat /mnt/*/log 2>/dev/null | wc -l") < 10 && time.Now().Before(deadline); {
		time.Sleep(50 * time.Millisecond)
	}

	// As many lines of the first log are written back as the second one has; the first one's last may not be.
	before := b.number(live, "wc -l < /mnt/b/log")
	crash := b.snapshot("crash", one.ID, "crash")
	after := b.number(live, "wc -l < /mnt/a/log")
	b.sh(live, "echo not synced > /mnt/a/note")
	consistent := b.snapshot("consistent", one.ID, "filesystem")
	group, err := csi.NewGroupControllerClient(b.conn).CreateVolumeGroupSnapshot(b.ctx(), &csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: []string{one.ID, two.ID}})
	must(t, err)
	members := map[string]string{}
	for _, s := range group.GetGroupSnapshot().GetSnapshots() {
		members[s.GetSourceVolumeId()] = s.GetSnapshotId()
	}
	if n := b.number(live, "wc -l < /mnt/a/log"); n <= after {
		t.Errorf("the writer has not gone on: %d lines, %d before", n, after)
	}
	b.sh(live, "touch /mnt/a/stop")
	must(t, <-ended)

	sources := []*node.Volume{
		b.restored("crash", "ext4", crash, 0), b.restored("consistent", "ext4", consistent, 256*mib),
		b.restored("group-a", "ext4", members[one.ID], 0), b.restored("group-b", "xfs", members[two.ID], 0),
	}
	var mounts []node.Mount
	for _, v := range sources {
		mounts = append(mounts, b.published(v))
	}
	other, err := b.StartSandbox(b.ctx(), "other", mounts...)
	must(t, err)
	got := map[string]int{}
	for _, v := range sources {
		got[v.Name] = b.number(other, fmt.Sprintf(wholeLog, v.Name))
	}
	t.Logf("lines: %v; before the first %d, after it %d", got, before, after)
	if got["crash"] < before || got["crash"] > after {
		t.Errorf("the crash-consistent snapshot has %d lines, the log had %d to %d while it was cut", got["crash"], before, after)
	}
	if note := b.sh(other, "cat /mnt/consistent/note"); note != "not synced" {
		t.Errorf("the filesystem-consistent snapshot has not what was written before and not synced: %q", note)
	}
	if a, b := got["group-a"], got["group-b"]; a != b && a != b+1 {
		t.Errorf("the volumes of the group are of two moments: %d lines and %d", a, b)
	}
	if usage, err := sources[1].Stats(b.ctx()); err != nil || usage.GetTotal() < 200*mib {
		t.Errorf("the filesystem of the larger clone has %v, %v", usage, err)
	}
	must(t, other.Stop(b.ctx()), live.Stop(b.ctx()))
	must(t, deleteSnapshots(b, crash, consistent))
}

func deleteSnapshots(b *bench, ids ...string) (err error) {
	for _, id := range ids {
		_, failed := b.controller().DeleteSnapshot(b.ctx(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		err = errors.Join(err, failed)
	}
	return err
}

// TestDiscardReachesTheFile frees space in a guest and looks at what the volume's file takes on the host.
func TestDiscardReachesTheFile(t *testing.T) {
	b := newBench(t)
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			v := b.Volume("d"+fsType, fsType)
			must(t, v.Create(b.ctx(), 320*mib))
			_, err := b.controller().ControllerModifyVolume(b.ctx(), &csi.ControllerModifyVolumeRequest{VolumeId: v.ID, MutableParameters: map[string]string{csiplugin.ParameterDiscard: "online"}})
			must(t, err)
			s, err := b.StartSandbox(b.ctx(), "s"+fsType, b.published(v))
			must(t, err)
			dir := "/mnt/" + v.Name
			b.sh(s, "dd if=/dev/zero of="+dir+"/big bs=1M count=48 2>/dev/null; sync")
			full := b.allocated(v)
			b.sh(s, "rm "+dir+"/big; sync; sync")
			left := b.allocated(v)
			for deadline := time.Now().Add(time.Minute); left > full-40*mib && time.Now().Before(deadline); left = b.allocated(v) {
				b.sh(s, "sync") // discards follow the journal
			}
			if full < 48*mib || left > full-40*mib {
				t.Errorf("the file takes %d bytes of %d after 48 MiB were freed in the guest", left, full)
			}
			must(t, s.Stop(b.ctx()))
		})
	}
}

// allocated is what a volume takes in the pool.
func (b *bench) allocated(v *node.Volume) int64 {
	b.t.Helper()
	files, err := filepath.Glob(b.Path("pool", "*", "objects", v.ID))
	must(b.t, err)
	if len(files) == 0 {
		files = []string{b.Path("pool", "objects", v.ID)}
	}
	var st unix.Stat_t
	must(b.t, unix.Stat(files[0], &st))
	return st.Blocks * 512
}
