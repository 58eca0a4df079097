package csiplugin_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/testing/protocmp"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/test/priv"
)

// TestRepair loses the catalog in several ways and compares what a CO is shown afterwards with what it was shown before.
func TestRepair(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for name, lose := range map[string]func(h *host){
		"the catalog is gone": func(h *host) { must(h.t, os.Remove(filepath.Join(h.root(), "catalog.db"))) },
		"the catalog is damaged": func(h *host) {
			must(h.t, os.WriteFile(filepath.Join(h.root(), "catalog.db"), []byte("no catalog"), 0o600))
		},
		"the catalog and the pool's id": func(h *host) {
			must(h.t, os.Remove(filepath.Join(h.root(), "catalog.db")), os.Remove(filepath.Join(h.root(), "pool.json")))
		},
		"nothing": func(*host) {},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, "xfs")
			v := withData(h)
			other := h.create("other", mounted("xfs"), map[string]string{"crust.dev/defer": "auto"})
			_, err := h.control.ControllerModifyVolume(h.call(), &csi.ControllerModifyVolumeRequest{VolumeId: other.id, MutableParameters: map[string]string{csiplugin.ParameterDiscard: "online"}})
			must(t, err)
			_, err = h.control.ControllerExpandVolume(h.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 40 * mib}})
			must(t, err)
			h.clone("clone", snapshotSource(h.snapshot("s", v.id)), 0)
			_, err = h.groupSnapshot("g", v.id, other.id)
			must(t, err)
			volumes, snapshots := h.everything()
			h.stop()
			lose(h)
			found, err := csiplugin.Repair(t.Context(), h.pool, log)
			if err != nil || len(found.Guessed)+len(found.Unknown) > 0 {
				t.Fatalf("got %+v, %v", found, err)
			}
			if _, err := os.Stat(found.Aside); found.Aside != "" && err != nil {
				t.Error(err)
			}
			h.start()
			volumesAfter, snapshotsAfter := h.everything()
			if diff := cmp.Diff(volumes, volumesAfter, protocmp.Transform()) + cmp.Diff(snapshots, snapshotsAfter, protocmp.Transform()); diff != "" {
				t.Error(diff)
			}
			// Names are known again, and a volume's parameters.
			again, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{
				Name: "other", VolumeCapabilities: []*csi.VolumeCapability{other.cap}, Parameters: map[string]string{"crust.dev/defer": "auto"},
				MutableParameters: map[string]string{csiplugin.ParameterDiscard: "online"},
			})
			if err != nil || again.GetVolume().GetVolumeId() != other.id {
				t.Errorf("got %v, %v", again, err)
			}
			h.deleteAll()
			if left := h.objects(); len(left) > 0 {
				t.Errorf("left are %v", left)
			}
		})
	}
}

// everything is what a CO is shown.
func (h *host) everything() (*csi.ListVolumesResponse, *csi.ListSnapshotsResponse) {
	h.t.Helper()
	volumes, err := h.control.ListVolumes(h.call(), &csi.ListVolumesRequest{})
	must(h.t, err)
	snapshots, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{})
	must(h.t, err)
	return volumes, snapshots
}

func TestRepairGuessesWhatNothingWasNotedWith(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	must(t, v.stage(), v.publish("t"), os.WriteFile(h.path("t/file"), []byte("data"), 0o600), v.unpublish("t"), v.unstage())
	h.stop()
	must(t, unix.Removexattr(v.file(), "user.crust.label"), os.Remove(filepath.Join(h.root(), "catalog.db")), os.WriteFile(h.file("foreign.txt"), nil, 0o600), os.WriteFile(h.file("foreign"), nil, 0o600))
	found, err := csiplugin.Repair(t.Context(), h.pool, slog.New(slog.DiscardHandler))
	if err != nil || len(found.Guessed) != 1 || found.Volumes != 1 || len(found.Unknown) != 1 {
		t.Fatalf("got %+v, %v", found, err)
	}
	h.start()
	must(t, v.stage(), v.publish("t"))
	if got := string(read(t, h.path("t/file"))); got != "data" {
		t.Errorf("the volume has %q", got)
	}
	must(t, v.unpublish("t"), v.unstage(), v.delete())
}

func TestRepairMakesNoPool(t *testing.T) {
	priv.Root(t)
	dir := t.TempDir()
	if _, err := csiplugin.Repair(t.Context(), dir, slog.New(slog.DiscardHandler)); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	h := newHost(t, "xfs")
	if _, err := csiplugin.Repair(t.Context(), h.pool, slog.New(slog.DiscardHandler)); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("a pool that is served: %v", err)
	}
}
