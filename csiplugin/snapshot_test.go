package csiplugin_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

func volumeSource(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

func snapshotSource(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

// cloneRequest asks for a clone of size bytes, or of its source's if that is 0.
func cloneRequest(name string, source *csi.VolumeContentSource, size int64) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability(multiWriter, &csi.VolumeCapability_MountVolume{})}, VolumeContentSource: source}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	return req
}

// clone makes a volume from a source.
func (h *host) clone(name string, source *csi.VolumeContentSource, size int64) *volume {
	h.t.Helper()
	resp, err := h.control.CreateVolume(h.call(), cloneRequest(name, source, size))
	must(h.t, err)
	v := resp.GetVolume()
	return &volume{host: h, id: v.GetVolumeId(), size: v.GetCapacityBytes(), cap: capability(multiWriter, &csi.VolumeCapability_MountVolume{}), context: v.GetVolumeContext()}
}

func (h *host) snapshot(name, volume string) (id string) {
	h.t.Helper()
	resp, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume})
	must(h.t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

func (h *host) groupSnapshot(name string, volumes ...string) (*csi.VolumeGroupSnapshot, error) {
	resp, err := h.group.CreateVolumeGroupSnapshot(h.call(), &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: volumes})
	return resp.GetGroupSnapshot(), err
}

// deleteAll deletes every volume, snapshot and group snapshot.
func (h *host) deleteAll() {
	h.t.Helper()
	snaps, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{})
	must(h.t, err)
	for _, entry := range snaps.GetEntries() {
		if g := entry.GetSnapshot().GetGroupSnapshotId(); g != "" {
			_, err = h.group.DeleteVolumeGroupSnapshot(h.call(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g})
		} else {
			_, err = h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: entry.GetSnapshot().GetSnapshotId()})
		}
		must(h.t, err)
	}
	volumes, err := h.control.ListVolumes(h.call(), &csi.ListVolumesRequest{})
	must(h.t, err)
	for _, entry := range volumes.GetEntries() {
		_, err := h.control.DeleteVolume(h.call(), &csi.DeleteVolumeRequest{VolumeId: entry.GetVolume().GetVolumeId()})
		must(h.t, err)
	}
}

// TestAskingForAClone is the table of answers of CSI, CreateVolume, for volumes with a source.
func TestAskingForAClone(t *testing.T) {
	h := newHost(t, "xfs")
	a, b := h.sized("a", mounted("xfs"), 400*mib), h.create("b", mounted("ext4"), nil)
	write(t, a.file(), []byte("data"), mib)
	snap := h.snapshot("s", a.id)
	first, err := h.control.CreateVolume(h.call(), cloneRequest("clone", snapshotSource(snap), 0))
	must(t, err)
	if v := first.GetVolume(); v.GetCapacityBytes() != 400*mib || v.GetContentSource().GetSnapshot().GetSnapshotId() != snap {
		t.Errorf("got %v", v)
	}
	pool := handle.Pool(h.poolID())
	for name, c := range map[string]struct {
		req  *csi.CreateVolumeRequest
		want codes.Code
		text string
	}{
		"the same again":                     {cloneRequest("clone", snapshotSource(snap), 0), codes.OK, ""},
		"the same with its size":             {cloneRequest("clone", snapshotSource(snap), 400*mib), codes.OK, ""},
		"its name from another source":       {cloneRequest("clone", volumeSource(a.id), 0), codes.AlreadyExists, snap},
		"its name without a source":          {cloneRequest("clone", nil, 0), codes.AlreadyExists, snap},
		"its name with another size":         {cloneRequest("clone", snapshotSource(snap), 500*mib), codes.AlreadyExists, "bytes"},
		"the name of an empty volume":        {cloneRequest("b", volumeSource(a.id), 0), codes.AlreadyExists, "empty"},
		"smaller than its source":            {cloneRequest("new", volumeSource(a.id), 399*mib), codes.OutOfRange, "source"},
		"a size that rounds to its source's": {cloneRequest("rounded", volumeSource(a.id), 400*mib-100), codes.OK, ""},
		"a limit below its source":           {&csi.CreateVolumeRequest{Name: "new", VolumeCapabilities: []*csi.VolumeCapability{mounted("xfs")}, CapacityRange: &csi.CapacityRange{LimitBytes: 399 * mib}, VolumeContentSource: volumeSource(a.id)}, codes.OutOfRange, "source"},
		"a volume that never was":            {cloneRequest("new", volumeSource(handle.NewVolume(pool).String()), 0), codes.NotFound, ""},
		"a snapshot that never was":          {cloneRequest("new", snapshotSource(handle.NewSnapshot(pool).String()), 0), codes.NotFound, ""},
		"a volume's id as a snapshot's":      {cloneRequest("new", snapshotSource(a.id), 0), codes.NotFound, "snapshot"},
		"another pool's volume":              {cloneRequest("new", volumeSource(handle.NewVolume("ffffffffffff").String()), 0), codes.ResourceExhausted, "ffffffffffff"},
		"another pool's snapshot":            {cloneRequest("new", snapshotSource(handle.NewSnapshot("ffffffffffff").String()), 0), codes.ResourceExhausted, "ffffffffffff"},
		"another filesystem": {&csi.CreateVolumeRequest{Name: "new", VolumeCapabilities: []*csi.VolumeCapability{mounted("ext4")},
			VolumeContentSource: volumeSource(a.id)}, codes.InvalidArgument, "xfs"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.control.CreateVolume(h.call(), c.req)
			wantCode(t, err, c.want, c.text)
		})
	}
	must(t, b.delete())
	h.deleteAll()
	if left := h.objects(); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
}

// TestClonesLive mounts clones beside their source, larger and as large, changes each, and deletes what they came from.
func TestClonesLive(t *testing.T) {
	for _, fstype := range []string{"ext4", "xfs"} {
		t.Run(fstype, func(t *testing.T) {
			h := newHost(t, "xfs")
			v := h.create("v", mounted(fstype), nil)
			must(t, v.stage(), v.publish("t"), os.WriteFile(h.path("t/file"), []byte("from the source"), 0o600))
			// Not synced: the page caches of the filesystem and the device hold it.
			snap := h.snapshot("s", v.id)
			must(t, os.WriteFile(h.path("t/file"), []byte("changed since"), 0o600))
			same := h.clone("same", snapshotSource(snap), 0)
			must(t, same.stage(), same.publish("same"))
			if got := string(read(t, h.path("same/file"))); got != "from the source" {
				t.Errorf("the clone beside its source has %q", got)
			}
			if fstype == "xfs" || canGrow(t) {
				larger := h.clone("larger", volumeSource(v.id), v.size+256*mib)
				must(t, larger.stage(), larger.publish("larger"))
				if got := string(read(t, h.path("larger/file"))); got != "changed since" {
					t.Errorf("the larger clone has %q", got)
				}
				must(t, os.WriteFile(h.path("larger/big"), bytes.Repeat([]byte("x"), int(v.size)), 0o600))
				must(t, larger.unpublish("larger"), larger.unstage(), larger.delete())
			}
			must(t, os.WriteFile(h.path("same/file"), []byte("of the clone"), 0o600))
			if got := string(read(t, h.path("t/file"))); got != "changed since" {
				t.Errorf("the source has %q after its clone was written", got)
			}
			must(t, v.unpublish("t"), v.unstage(), v.delete())
			again := h.clone("again", snapshotSource(snap), 0)
			_, err := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: snap})
			must(t, err, again.stage(), again.publish("again"))
			if got := string(read(t, h.path("again/file"))); got != "from the source" {
				t.Errorf("a clone whose volume and snapshot are gone has %q", got)
			}
			must(t, same.unpublish("same"), same.unstage(), same.delete(), again.unpublish("again"), again.unstage(), again.delete())
		})
	}
}

// canGrow says whether this process may grow a mounted ext4.
func canGrow(t *testing.T) bool {
	grows := true
	t.Run("ext4 can be grown here", func(t *testing.T) {
		defer func() { grows = !t.Skipped() }()
		scratch.CanGrowExt4(t)
	})
	return grows
}

func TestACloneOfABlankVolumeIsFormatted(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	clone := h.clone("clone", volumeSource(v.id), 0)
	must(t, clone.stage(), clone.publish("t"), clone.unpublish("t"), clone.unstage())
	second := h.clone("second", volumeSource(v.id), 0)
	must(t, second.stage())
	fs, err := second.deferTo("t", false)
	if err != nil || !fs.GetNeverWritten() {
		t.Errorf("got %v, %v", fs, err)
	}
	must(t, second.undefer("t", true), second.unstage())
}

func TestCreateSnapshot(t *testing.T) {
	h := newHost(t, "xfs")
	a, b := h.create("a", mounted("ext4"), nil), h.create("b", block(), nil)
	before := time.Now().Add(-time.Second)
	resp, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: a.id})
	must(t, err)
	s := resp.GetSnapshot()
	if s.GetSourceVolumeId() != a.id || s.GetSizeBytes() != a.size || !s.GetReadyToUse() || s.GetCreationTime().AsTime().Before(before) ||
		s.GetGroupSnapshotId() != "" || len(s.GetAccessibleTopology()) != 1 {
		t.Errorf("got %v", s)
	}
	for name, c := range map[string]struct {
		req  *csi.CreateSnapshotRequest
		want codes.Code
		text string
	}{
		"again":              {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: a.id}, codes.OK, ""},
		"of another volume":  {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: b.id}, codes.AlreadyExists, a.id},
		"other parameters":   {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: a.id, Parameters: map[string]string{"crust.dev/snapshot-consistency": "filesystem"}}, codes.AlreadyExists, "parameters"},
		"no name":            {&csi.CreateSnapshotRequest{SourceVolumeId: a.id}, codes.InvalidArgument, "name"},
		"no volume":          {&csi.CreateSnapshotRequest{Name: "n"}, codes.InvalidArgument, "source_volume_id"},
		"no such volume":     {&csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: handle.NewVolume(handle.Pool(h.poolID())).String()}, codes.NotFound, ""},
		"another pool's":     {&csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: handle.NewVolume("ffffffffffff").String()}, codes.NotFound, "ffffffffffff"},
		"a bad parameter":    {&csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: a.id, Parameters: map[string]string{"a": "b"}}, codes.InvalidArgument, "snapshot-consistency"},
		"a bad consistency":  {&csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: a.id, Parameters: map[string]string{"crust.dev/snapshot-consistency": "some"}}, codes.InvalidArgument, "crash"},
		"another topology":   {&csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: a.id, AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"a": "b"}}}}}, codes.ResourceExhausted, "pool"},
		"consistent at rest": {&csi.CreateSnapshotRequest{Name: "rest", SourceVolumeId: a.id, Parameters: map[string]string{"crust.dev/snapshot-consistency": "filesystem"}}, codes.OK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			again, err := h.control.CreateSnapshot(h.call(), c.req)
			wantCode(t, err, c.want, c.text)
			if err == nil && c.req.GetName() == "s" && again.GetSnapshot().GetSnapshotId() != s.GetSnapshotId() {
				t.Errorf("got another snapshot: %v", again)
			}
		})
	}
	must(t, a.stage(), a.publish("t"))
	_, err = h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "live", SourceVolumeId: a.id, Parameters: map[string]string{"crust.dev/snapshot-consistency": "filesystem"}})
	wantCode(t, err, codes.FailedPrecondition, a.id, "host")
	must(t, a.unpublish("t"), a.unstage())
	h.deleteAll()
}

func TestDeleteSnapshot(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	snap := h.snapshot("s", v.id)
	remove := func(id string) error {
		_, err := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		return err
	}
	f, err := os.Open(h.file(snap))
	must(t, err)
	wantCode(t, remove(snap), codes.FailedPrecondition, "in use")
	must(t, f.Close(), remove(snap), remove(snap))
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "none": codes.OK, v.id: codes.OK, handle.NewSnapshot("ffffffffffff").String(): codes.FailedPrecondition} {
		wantCode(t, remove(id), want)
	}
	if got := h.objects(); !slices.Equal(got, []string{v.id}) {
		t.Errorf("left are %v", got)
	}
}

// TestPagesAreStable goes through pages while entries come and go.
func TestPagesAreStable(t *testing.T) {
	h := newHost(t, "xfs")
	stay := map[string]int{}
	for i := range 12 {
		stay[h.create(fmt.Sprint("stay-", i), mounted("ext4"), nil).id] = 0
	}
	passing := h.create("passing", mounted("ext4"), nil)
	token := ""
	for page := 0; ; page++ {
		resp, err := h.control.ListVolumes(h.call(), &csi.ListVolumesRequest{MaxEntries: 3, StartingToken: token})
		must(t, err)
		if len(resp.GetEntries()) > 3 {
			t.Fatalf("a page has %d entries", len(resp.GetEntries()))
		}
		for _, entry := range resp.GetEntries() {
			if _, ok := stay[entry.GetVolume().GetVolumeId()]; ok {
				stay[entry.GetVolume().GetVolumeId()]++
			}
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
		// What comes and goes includes the entry that the token is of.
		h.create(fmt.Sprint("new-", page), mounted("ext4"), nil)
		if page == 0 {
			must(t, passing.delete())
		}
		if _, ok := stay[token]; !ok {
			must(t, (&volume{host: h, id: token}).delete())
		}
	}
	for id, times := range stay {
		if times != 1 {
			t.Errorf("volume %s was listed %d times", id, times)
		}
	}
	for _, token := range []string{"none", handle.NewVolume("ffffffffffff").String(), handle.NewSnapshot(handle.Pool(h.poolID())).String()} {
		_, err := h.control.ListVolumes(h.call(), &csi.ListVolumesRequest{StartingToken: token})
		wantCode(t, err, codes.Aborted, "token")
	}
	_, err := h.control.ListVolumes(h.call(), &csi.ListVolumesRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument)
}

// TestALongCutIsFoundInProgress stops a cut in the middle, lets its caller give up, and asks again.
func TestALongCutIsFoundInProgress(t *testing.T) {
	h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
	reached, goOn := make(chan struct{}), make(chan struct{})
	h.watch = func(ctx context.Context) context.Context {
		return crashpoint.With(ctx, func(place string) {
			if place == "object cloned" {
				close(reached)
				<-goOn
			}
		})
	}
	h.start()
	v, other := h.create("v", mounted("ext4"), nil), h.create("other", mounted("ext4"), nil)
	ctx, cancel := context.WithCancel(h.call())
	answered := make(chan error, 1)
	req := &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id}
	go func() {
		_, err := h.control.CreateSnapshot(ctx, req)
		answered <- err
	}()
	<-reached
	cancel()
	wantCode(t, <-answered, codes.Canceled)
	_, err := h.control.CreateSnapshot(h.call(), req)
	wantCode(t, err, codes.Aborted, "under way")
	wantCode(t, v.delete(), codes.Aborted)
	list, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{})
	if err != nil || len(list.GetEntries()) > 0 {
		t.Errorf("a snapshot that is not yet cut is listed: %v, %v", list, err)
	}
	// Nobody else waits.
	must(t, other.stage(), other.unstage(), other.delete())
	close(goOn)
	for {
		resp, err := h.control.CreateSnapshot(h.call(), req)
		if status.Code(err) == codes.Aborted {
			continue
		}
		if err != nil || !resp.GetSnapshot().GetReadyToUse() {
			t.Errorf("got %v, %v", resp, err)
		}
		break
	}
	if got := h.objects(); len(got) != 2 {
		t.Errorf("the pool holds %v", got)
	}
}

// TestManyClonesAtOnce restores one snapshot many times at the same time.
func TestManyClonesAtOnce(t *testing.T) {
	h := newHost(t, "xfs")
	v := withData(h)
	snap := h.snapshot("s", v.id)
	errs := make(chan error)
	for i := range 16 {
		go func() {
			_, err := h.control.CreateVolume(h.call(), cloneRequest(fmt.Sprint("clone-", i), snapshotSource(snap), 0))
			errs <- err
		}()
	}
	var all error
	for range 16 {
		all = errors.Join(all, <-errs)
	}
	must(t, all)
	for _, name := range h.objects() {
		if got := read(t, h.file(name)); !strings.HasPrefix(string(got[mib:]), "data") {
			t.Errorf("%s has not the data", name)
		}
	}
}
