package csiplugin_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
)

func (v *volume) stats(path string) ([]*csi.VolumeUsage, error) {
	resp, err := v.node.NodeGetVolumeStats(v.call(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: path, StagingTargetPath: v.staging()})
	return resp.GetUsage(), err
}

func TestNodeGetVolumeStats(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	// Nothing is mounted there, and the filesystem of the staging path is not the volume's.
	usage, err := v.stats(v.staging())
	must(t, err)
	if len(usage) != 1 || usage[0].GetTotal() != 16*mib || usage[0].GetUsed() > mib {
		t.Errorf("staged: %v", usage)
	}
	must(t, v.publish("t"), os.WriteFile(h.path("t/file"), make([]byte, mib), 0o600))
	scratch.Run(t, "sync", "-f", h.path("t"))
	for _, path := range []string{h.path("t"), h.path("t") + "/", v.staging()} {
		usage, err := v.stats(path)
		must(t, err)
		if len(usage) != 2 || usage[0].GetUnit() != csi.VolumeUsage_BYTES || usage[1].GetUnit() != csi.VolumeUsage_INODES {
			t.Fatalf("at %s: %v", path, usage)
		}
		if b := usage[0]; b.GetTotal() < 8*mib || b.GetTotal() > 16*mib || b.GetUsed() < mib || b.GetAvailable() > b.GetTotal()-b.GetUsed() {
			t.Errorf("at %s: %v", path, b)
		}
		if i := usage[1]; i.GetTotal() <= 0 || i.GetUsed() < 12 || i.GetUsed()+i.GetAvailable() != i.GetTotal() {
			t.Errorf("at %s: %v", path, i)
		}
	}
	b := h.create("b", block(), nil)
	must(t, b.stage(), b.publish("b"))
	if usage, err := b.stats(h.path("b")); err != nil || len(usage) != 1 || usage[0].GetTotal() != 16*mib {
		t.Errorf("a block device: %v, %v", usage, err)
	}
	for name, c := range map[string]struct {
		id, path string
		want     codes.Code
	}{
		"no id":                 {"", h.path("t"), codes.InvalidArgument},
		"no path":               {v.id, "", codes.InvalidArgument},
		"another path":          {v.id, h.path("other"), codes.NotFound},
		"a relative path":       {v.id, "some/path", codes.NotFound},
		"another volume's path": {v.id, h.path("b"), codes.NotFound},
		"no such volume":        {"none", h.path("t"), codes.NotFound},
		"another pool's volume": {handle.NewVolume("ffffffffffff").String(), h.path("t"), codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.node.NodeGetVolumeStats(h.call(), &csi.NodeGetVolumeStatsRequest{VolumeId: c.id, VolumePath: c.path})
			wantCode(t, err, c.want)
		})
	}
	// A mount that somebody has taken away is not measured, least of all what is beneath it.
	scratch.Run(t, "umount", h.path("t"))
	_, err = v.stats(h.path("t"))
	wantCode(t, err, codes.NotFound)
	must(t, v.unpublish("t"), b.unpublish("b"))
}

func (v *volume) nodeExpand(path string, required int64) (int64, error) {
	resp, err := v.node.NodeExpandVolume(v.call(), &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: path, StagingTargetPath: v.staging(), VolumeCapability: v.cap,
		CapacityRange: &csi.CapacityRange{RequiredBytes: required},
	})
	return resp.GetCapacityBytes(), err
}

func (v *volume) expand(required int64) error {
	_, err := v.control.ControllerExpandVolume(v.call(), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: required},
	})
	return err
}

func TestExpansionOnTheHost(t *testing.T) {
	for fstype, size := range map[string]int64{"ext4": 16 * mib, "xfs": 300 * mib} {
		t.Run(fstype, func(t *testing.T) {
			if fstype == "ext4" {
				scratch.CanGrowExt4(t)
			}
			h := newHost(t, "xfs")
			v := h.create("a", mounted(fstype), nil)
			must(t, v.stage(), v.publish("t"), v.publishReadOnly("ro"))
			total := func() int64 {
				usage, err := v.stats(h.path("t"))
				must(t, err)
				return usage[0].GetTotal()
			}
			before := total()
			_, err := v.nodeExpand(h.path("t"), 2*size)
			wantCode(t, err, codes.OutOfRange, "ControllerExpandVolume")
			must(t, v.expand(2*size))
			for _, path := range []string{h.path("t"), h.path("ro"), v.staging()} {
				if got, err := v.nodeExpand(path, 2*size); err != nil || got != 2*size {
					t.Errorf("at %s: %d, %v", path, got, err)
				}
			}
			if after := total(); after < before+size*9/10 {
				t.Errorf("the filesystem has %d bytes, it had %d", after, before)
			}
			// What has grown while nothing was mounted grows when it is.
			must(t, v.unpublish("t"), v.unpublish("ro"), v.expand(3*size))
			if got, err := v.nodeExpand(v.staging(), 3*size); err != nil || got != 3*size {
				t.Errorf("staged: %d, %v", got, err)
			}
			must(t, v.publish("t"))
			if after := total(); after < before+2*size*9/10 {
				t.Errorf("the filesystem has %d bytes, it had %d", after, before)
			}
			must(t, v.unpublish("t"), v.unstage())
		})
	}
}

func TestExpansionOfABlockDevice(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", block(), nil)
	must(t, v.stage(), v.publish("t"), v.publishReadOnly("ro"), v.expand(32*mib))
	if got, err := v.nodeExpand(h.path("t"), 32*mib); err != nil || got != 32*mib {
		t.Errorf("got %d, %v", got, err)
	}
	for _, target := range []string{"t", "ro"} {
		if got := scratch.Run(t, "blockdev", "--getsize64", h.path(target)); got != "33554432\n" {
			t.Errorf("the device has %s bytes", got)
		}
	}
	must(t, v.unpublish("t"), v.unpublish("ro"))
}

func TestNodeExpandVolumeRefusesBadRequests(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", capability(reader, &csi.VolumeCapability_MountVolume{}), nil)
	rw := *v
	rw.cap = mounted("ext4")
	must(t, rw.stage(), rw.publish("t"), rw.unpublish("t"), rw.unstage(), v.stage(), v.publish("t"))
	good := &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: h.path("t")}
	for name, c := range map[string]struct {
		change func(*csi.NodeExpandVolumeRequest)
		want   codes.Code
	}{
		"no id":                   {func(r *csi.NodeExpandVolumeRequest) { r.VolumeId = "" }, codes.InvalidArgument},
		"no path":                 {func(r *csi.NodeExpandVolumeRequest) { r.VolumePath = "" }, codes.InvalidArgument},
		"a relative path":         {func(r *csi.NodeExpandVolumeRequest) { r.VolumePath = "some/path" }, codes.InvalidArgument},
		"another path":            {func(r *csi.NodeExpandVolumeRequest) { r.VolumePath += "x" }, codes.NotFound},
		"no such volume":          {func(r *csi.NodeExpandVolumeRequest) { r.VolumeId, r.VolumePath = "none", "some/path" }, codes.NotFound},
		"another pool's volume":   {func(r *csi.NodeExpandVolumeRequest) { r.VolumeId = handle.NewVolume("ffffffffffff").String() }, codes.NotFound},
		"another capability":      {func(r *csi.NodeExpandVolumeRequest) { r.VolumeCapability = block() }, codes.InvalidArgument},
		"a malformed capability":  {func(r *csi.NodeExpandVolumeRequest) { r.VolumeCapability = &csi.VolumeCapability{} }, codes.InvalidArgument},
		"a negative size":         {func(r *csi.NodeExpandVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: -1} }, codes.InvalidArgument},
		"a limit below its size":  {func(r *csi.NodeExpandVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: mib} }, codes.OutOfRange},
		"a filesystem only read":  {func(r *csi.NodeExpandVolumeRequest) {}, codes.FailedPrecondition},
		"more than the volume is": {func(r *csi.NodeExpandVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: gib} }, codes.OutOfRange},
	} {
		t.Run(name, func(t *testing.T) {
			req := &csi.NodeExpandVolumeRequest{VolumeId: good.VolumeId, VolumePath: good.VolumePath}
			c.change(req)
			_, err := h.node.NodeExpandVolume(h.call(), req)
			wantCode(t, err, c.want)
		})
	}
	must(t, v.unpublish("t"))
}

func TestNodeGetVolumeHealth(t *testing.T) {
	h := newHost(t, "xfs")
	reasons := func(v *volume) string {
		t.Helper()
		resp, err := h.node.NodeGetVolumeHealth(h.call(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.id})
		must(t, err)
		if resp.GetVolumeHealth().GetVolumeId() != v.id {
			t.Errorf("the health is that of %q", resp.GetVolumeHealth().GetVolumeId())
		}
		var text string
		for _, s := range resp.GetVolumeHealth().GetHealthStatuses() {
			text += s.GetStatus().String() + " " + s.GetReason() + " "
		}
		return text
	}
	for name, c := range map[string]struct {
		fstype string
		harm   func(t *testing.T, v *volume) (repair func())
		want   string
	}{
		"nothing is wrong": {"ext4", func(*testing.T, *volume) func() { return func() {} }, ""},
		"ext4 has turned read-only": {"ext4", func(t *testing.T, v *volume) func() {
			scratch.Run(t, "mount", "-o", "remount,ro", v.staging())
			return func() {}
		}, "DEGRADED FilesystemReadOnly "},
		"xfs has shut down": {"xfs", func(t *testing.T, v *volume) func() {
			scratch.Run(t, "xfs_io", "-x", "-c", "shutdown", v.staging())
			return func() {}
		}, "INACCESSIBLE FilesystemShutDown "},
		"the data is gone": {"ext4", func(t *testing.T, v *volume) func() {
			must(t, v.unpublish("t"), os.Rename(v.file(), v.file()+"x"))
			return func() { must(t, os.Rename(v.file()+"x", v.file()), v.publish("t")) }
		}, "DATA_LOSS VolumeDataLost "},
		"the data is too short": {"ext4", func(t *testing.T, v *volume) func() {
			must(t, v.unpublish("t"), os.Truncate(v.file(), mib))
			wantCode(t, v.publish("t"), codes.DataLoss)
			return func() { must(t, os.Truncate(v.file(), 16*mib)) }
		}, "DATA_LOSS VolumeDataLost "},
	} {
		t.Run(name, func(t *testing.T) {
			v := h.create(filepath.Base(t.Name()), mounted(c.fstype), nil)
			must(t, v.stage(), v.publish("t"))
			repair := c.harm(t, v)
			if got := reasons(v); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			repair()
			must(t, v.unpublish("t"), v.unstage())
		})
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "none": codes.NotFound} {
		_, err := h.node.NodeGetVolumeHealth(h.call(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		wantCode(t, err, want)
	}
}
