package csiplugin_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/internal/scratch"
	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
)

// sidecarPause is how long a sidecar of these tests waits before it asks again.
const sidecarPause = 10 * time.Millisecond

// imageSnapshot does what the snapshot sidecar does: it asks again until the snapshot is ready.
func (h *host) imageSnapshot(name, volume, format string) *csi.Snapshot {
	h.t.Helper()
	req := &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume, Parameters: map[string]string{"type": "bi", "export-type": format}}
	var first *csi.Snapshot
	for ; ; time.Sleep(sidecarPause) {
		resp, err := h.control.CreateSnapshot(h.call(), req)
		if status.Code(err) == codes.Aborted {
			continue
		}
		must(h.t, err)
		snap := resp.GetSnapshot()
		if first == nil {
			first = snap
		}
		if snap.GetSnapshotId() != first.GetSnapshotId() || !snap.GetCreationTime().AsTime().Equal(first.GetCreationTime().AsTime()) || snap.GetSizeBytes() != first.GetSizeBytes() {
			h.t.Fatalf("the snapshot has changed from %v to %v", first, snap)
		}
		if snap.GetReadyToUse() {
			return snap
		}
	}
}

func TestAVolumeIsExported(t *testing.T) {
	h := newImagesHost(t)
	v := h.create("pvc-1", mounted("ext4"), nil)
	want := golden(16 * mib)
	write(t, v.file(), want, 0)
	for _, format := range []string{"raw", "qcow2"} {
		t.Run(format, func(t *testing.T) {
			snap := h.imageSnapshot("snapshot-"+format, v.id, format)
			if snap.GetSourceVolumeId() != v.id || snap.GetSizeBytes() != v.size {
				t.Errorf("got %v", snap)
			}
			got, err := backing.ParseHandle(snap.GetSnapshotId())
			if err != nil || got.Image != "snapshot-"+format || got.Source != backing.Export || got.Volume != v.id || string(got.Format) != format {
				t.Errorf("the handle says %v, %v", got, err)
			}
			write(t, v.file(), []byte("later"), mib)
			h.restored("restored-"+format, snap.GetSnapshotId(), 0, want)
			h.restored("referred-"+format, "bi://backing?backingImageDataSourceType=export-from-volume&backingImage=snapshot-"+format, 0, want)
			write(t, v.file(), want, 0)
			h.restored("on demand by name "+format, exported("by-name-"+format, "pvc-1", format), 0, want)
			h.restored("on demand by id "+format, exported("by-id-"+format, v.id, format), 0, want)
			img := h.images()["snapshot-"+format]
			if (img.GetExportPath() != "") != (format == "qcow2") || img.GetOrigin() != "snapshot" || img.GetConsistency() != "filesystem" {
				t.Errorf("it is listed as %v", img)
			}
			if format == "qcow2" {
				file := read(t, img.GetExportPath())
				raw := filepath.Join(h.dir, "unpacked")
				scratch.Run(t, "qemu-img", "convert", "-f", "qcow2", "-O", "raw", img.GetExportPath(), raw)
				if img.GetChecksum() != sha(file) || !bytes.Equal(read(t, raw), want) {
					t.Error("the export is not the volume")
				}
			}
		})
	}
	must(t, v.delete())
	h.restored("after the volume has gone", "bi://backing?backingImageDataSourceType=export-from-volume&backingImage=snapshot-raw", 0, want)
}

func TestSnapshotsOfTypes(t *testing.T) {
	h := newImagesHost(t)
	v, other := h.create("v", mounted("ext4"), nil), h.create("other", mounted("ext4"), nil)
	create := func(name, volume string, parameters map[string]string) (*csi.Snapshot, error) {
		for {
			resp, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume, Parameters: parameters})
			if status.Code(err) != codes.Aborted {
				return resp.GetSnapshot(), err
			}
		}
	}
	snap, err := create("ordinary", v.id, map[string]string{"type": "snap"})
	must(t, err)
	if same, err := create("ordinary", v.id, nil); err != nil || same.GetSnapshotId() != snap.GetSnapshotId() {
		t.Errorf("the default is another type: %v, %v", same, err)
	}
	img, err := create("image", v.id, map[string]string{"type": "bi", "exportType": "raw"})
	must(t, err)
	if !img.GetReadyToUse() {
		t.Error("a raw export is not ready at once")
	}
	if same, err := create("image", v.id, map[string]string{"type": "bi"}); err != nil || same.GetSnapshotId() != img.GetSnapshotId() {
		t.Errorf("the default is another format: %v, %v", same, err)
	}
	for name, row := range map[string]struct {
		name, volume string
		parameters   map[string]string
		code         codes.Code
		text         string
	}{
		"an unknown type":              {"x", v.id, map[string]string{"type": "bak"}, codes.InvalidArgument, "type"},
		"an unknown format":            {"x", v.id, map[string]string{"type": "bi", "export-type": "vmdk"}, codes.InvalidArgument, "export-type"},
		"a format twice":               {"x", v.id, map[string]string{"type": "bi", "export-type": "raw", "exportType": "raw"}, codes.InvalidArgument, "exportType"},
		"a format of a snapshot":       {"x", v.id, map[string]string{"export-type": "raw"}, codes.InvalidArgument, "type=bi"},
		"another parameter":            {"x", v.id, map[string]string{"type": "bi", "nodeSelector": "x"}, codes.InvalidArgument, "nodeSelector"},
		"no volume":                    {"x", "", map[string]string{"type": "bi"}, codes.InvalidArgument, "source_volume_id"},
		"a volume that is not":         {"x", v.id[:len(v.id)-4] + "0000", map[string]string{"type": "bi"}, codes.NotFound, "volume"},
		"the image, of another volume": {"image", other.id, map[string]string{"type": "bi"}, codes.AlreadyExists, v.id},
		"the image, as qcow2":          {"image", v.id, map[string]string{"type": "bi", "export-type": "qcow2"}, codes.AlreadyExists, "raw"},
		"the image, crash-consistent":  {"image", v.id, map[string]string{"type": "bi", csiplugin.ParameterConsistency: "crash"}, codes.AlreadyExists, "image"},
		"the image as a snapshot":      {"image", v.id, nil, codes.AlreadyExists, "type=bi"},
		"the snapshot as an image":     {"ordinary", v.id, map[string]string{"type": "bi"}, codes.AlreadyExists, "ordinary"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := create(row.name, row.volume, row.parameters)
			wantCode(t, err, row.code, row.text)
		})
	}
	t.Run("an image that was prepared on demand", func(t *testing.T) {
		h.restored("w", exported("prepared", v.id, "raw"), 0, nil)
		_, err := create("prepared", v.id, map[string]string{"type": "bi"})
		wantCode(t, err, codes.AlreadyExists, "no snapshot")
	})
}

func (h *host) deleteSnapshot(id string) error {
	_, err := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	return err
}

func TestDeleteSnapshotOfImages(t *testing.T) {
	h := newImagesHost(t)
	disk := golden(20 * mib)
	s := backingtest.Serve(t, backingtest.File(disk))
	v := h.create("v", mounted("ext4"), nil)
	mine, theirs := onDemand("mine", s.URL), onDemand("theirs", s.URL)
	h.restored("a", mine, 0, disk)
	_, err := imagesv1.NewImagesClient(h.conn).PrepareImage(h.call(), &imagesv1.PrepareImageRequest{Handle: theirs})
	must(t, err)
	h.restored("b", theirs, 0, disk)
	snap := h.imageSnapshot("snap", v.id, "qcow2")
	for name, id := range map[string]string{
		"a reference":          "bi://backing?backingImageDataSourceType=download&backingImage=mine",
		"the operator's":       theirs,
		"a snapshot's by name": "bi://backing?backingImageDataSourceType=export-from-volume&backingImage=snap",
		"another one's name":   onDemand("mine", s.URL+"/x"),
		"nothing":              onDemand("none", s.URL),
	} {
		if err := h.deleteSnapshot(id); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := h.images(); len(got) != 3 {
		t.Errorf("there are the images %v", got)
	}
	for name, id := range map[string]string{"an unknown prefix": "bak://v/b", "no handle": "bi://backing?x=y", "an old prefix": "snap://v/s"} {
		if code := status.Code(h.deleteSnapshot(id)); code != codes.InvalidArgument {
			t.Errorf("%s: %v", name, code)
		}
	}
	other, err := backing.ParseHandle(snap.GetSnapshotId())
	must(t, err)
	other.ID = "000000000000" + other.ID[12:]
	wantCode(t, h.deleteSnapshot(other.String()), codes.FailedPrecondition, "000000000000")
	for range 2 {
		must(t, h.deleteSnapshot(mine), h.deleteSnapshot(snap.GetSnapshotId()))
	}
	if got := h.images(); len(got) != 1 || got["theirs"] == nil {
		t.Errorf("there are the images %v", got)
	}
	if files := h.imageFiles(); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
	_, err = h.restore("c", snap.GetSnapshotId(), 0)
	wantCode(t, err, codes.NotFound, "snap")
	again := h.imageSnapshot("snap", v.id, "raw")
	must(t, h.deleteSnapshot(snap.GetSnapshotId()))
	h.restored("d", again.GetSnapshotId(), 0, nil)
	_, err = imagesv1.NewImagesClient(h.conn).DeleteImage(h.call(), &imagesv1.DeleteImageRequest{Name: "snap"})
	wantCode(t, err, codes.FailedPrecondition, "snapshot")
	_, err = imagesv1.NewImagesClient(h.conn).DeleteImage(h.call(), &imagesv1.DeleteImageRequest{Name: "theirs"})
	must(t, err)
	h.restored("a", mine, 0, disk) // the volume that there is
}

func TestListSnapshotsHasImages(t *testing.T) {
	h := newImagesHost(t)
	v := h.create("v", mounted("ext4"), nil)
	want := map[string]bool{}
	for i := range 3 {
		want[h.imageSnapshot(fmt.Sprint("i", i), v.id, "raw").GetSnapshotId()] = true
		want[h.snapshot(fmt.Sprint("s", i), v.id)] = true
	}
	h.restored("not a snapshot", exported("on-demand", v.id, "raw"), 0, nil)
	for _, size := range []int32{0, 1, 2, 4} {
		got := map[string]bool{}
		for token := ""; ; {
			resp, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{MaxEntries: size, StartingToken: token, SourceVolumeId: v.id})
			must(t, err)
			if size > 0 && len(resp.GetEntries()) > int(size) {
				t.Errorf("a page of %d has %d entries", size, len(resp.GetEntries()))
			}
			for _, entry := range resp.GetEntries() {
				if got[entry.GetSnapshot().GetSnapshotId()] {
					t.Errorf("%s comes twice", entry.GetSnapshot().GetSnapshotId())
				}
				got[entry.GetSnapshot().GetSnapshotId()] = true
			}
			if token = resp.GetNextToken(); token == "" {
				break
			}
		}
		if len(got) != len(want) {
			t.Errorf("pages of %d: got %v", size, got)
		}
	}
	one := func(id string) *csi.Snapshot {
		t.Helper()
		resp, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{SnapshotId: id})
		must(t, err)
		got, getErr := h.control.GetSnapshot(h.call(), &csi.GetSnapshotRequest{SnapshotId: id})
		if len(resp.GetEntries()) == 0 {
			wantCode(t, getErr, codes.NotFound)
			return nil
		}
		must(t, getErr)
		if len(resp.GetEntries()) != 1 || got.GetSnapshot().String() != resp.GetEntries()[0].GetSnapshot().String() || got.GetSnapshot().GetSnapshotId() != id {
			t.Errorf("%s is listed as %v and got as %v", id, resp.GetEntries(), got)
		}
		return got.GetSnapshot()
	}
	for id := range want {
		if s := one(id); s.GetSizeBytes() != v.size || !s.GetReadyToUse() {
			t.Errorf("got %v", s)
		}
	}
	for _, id := range []string{onDemand("later", "https://images.example.com/x"), exported("later", "v", "qcow2"), exported("on-demand", v.id, "raw")} {
		if s := one(id); !s.GetReadyToUse() || !s.GetCreationTime().IsValid() {
			t.Errorf("%s: got %v", id, s)
		}
	}
	if s := one("bi://backing?backingImageDataSourceType=download&backingImage=none"); s != nil {
		t.Errorf("got %v", s)
	}
	_, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{SnapshotId: "bi://backing?x=y"})
	wantCode(t, err, codes.InvalidArgument, "x")
}

// TestAGuestCannotChooseWhatItsRawExportLooksLike writes a qcow2 header to a guest's disk (CVE-2026-24708).
func TestAGuestCannotChooseWhatItsRawExportLooksLike(t *testing.T) {
	h := newImagesHost(t)
	v := h.create("v", mounted("ext4"), nil)
	disk := append(backingtest.QCOW2(mib, nil), golden(4*mib)...)
	backingtest.Backing(disk, "/etc/shadow")
	write(t, v.file(), disk, 0)
	_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id, Parameters: map[string]string{"type": "bi"}})
	wantCode(t, err, codes.FailedPrecondition, "export-type=qcow2")
	if got := h.objects(); len(got) != 1 {
		t.Errorf("there are the objects %v", got)
	}
	h.restored("w", h.imageSnapshot("s", v.id, "qcow2").GetSnapshotId(), 0, disk)
}

// TestImagesOfAVolumeInASandbox has filesystems frozen if somebody can.
func TestImagesOfAVolumeInASandbox(t *testing.T) {
	h, d := newHostWithDaemon(t)
	v := h.sandboxed("v")
	for name, row := range map[string]struct {
		refuse     error
		parameters map[string]string
		want       string
		code       codes.Code
		events     int
	}{
		"frozen":                       {nil, nil, "filesystem", codes.OK, 2},
		"nobody can":                   {fmt.Errorf("this runtime cannot freeze: %w", errdefs.ErrNotImplemented), nil, "crash", codes.OK, 1},
		"nobody can now":               {fmt.Errorf("no answer: %w", errdefs.ErrUnavailable), nil, "", codes.Unavailable, 1},
		"nobody has to":                {nil, map[string]string{csiplugin.ParameterConsistency: "crash"}, "crash", codes.OK, 0},
		"somebody must":                {nil, filesystemConsistent, "filesystem", codes.OK, 2},
		"somebody must and nobody can": {fmt.Errorf("this runtime cannot freeze: %w", errdefs.ErrFailedPrecondition), filesystemConsistent, "", codes.FailedPrecondition, 1},
	} {
		t.Run(name, func(t *testing.T) {
			d.behave(row.refuse, false)
			parameters := map[string]string{"type": "bi"}
			maps.Copy(parameters, row.parameters)
			_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id, Parameters: parameters})
			wantCode(t, err, row.code)
			if got := h.images()[name].GetConsistency(); got != row.want {
				t.Errorf("it is %q, want %q", got, row.want)
			}
			if events := d.noted(); len(events) != row.events {
				t.Errorf("the daemon was asked for %q", events)
			}
		})
	}
	v.giveBack("v")
}

// TestNobodyWritesToAnImage opens what images are kept in, as root. A volume that is made from one is not protected.
func TestNobodyWritesToAnImage(t *testing.T) {
	h := newImagesHost(t)
	v := h.create("v", mounted("ext4"), nil)
	disk := golden(16 * mib)
	write(t, v.file(), disk, 0)
	s := files(t, disk)
	handles := map[string]string{
		"cut":      h.imageSnapshot("cut", v.id, "raw").GetSnapshotId(),
		"exported": h.imageSnapshot("exported", v.id, "qcow2").GetSnapshotId(),
		"raw":      onDemand("raw", s.URL+"/raw"),
		"unpacked": onDemand("unpacked", s.URL+"/disk.qcow2"),
	}
	for name, handle := range handles {
		write(t, h.file(h.restored("of "+name, handle, 0, disk).GetVolumeId()), []byte("mine"), 0)
	}
	sealed := func() {
		t.Helper()
		for name, img := range h.images() {
			if _, err := os.OpenFile(h.file(img.GetId()), os.O_RDWR, 0); !errors.Is(err, unix.EPERM) {
				t.Errorf("image %s can be opened for writing: %v", name, err)
			}
		}
	}
	sealed()
	h.stop()
	for _, object := range h.objects() {
		scratch.Run(t, "chattr", "-i", h.file(object)) // as a copy of the pool has it
	}
	h.start()
	sealed()
	for _, handle := range handles {
		must(t, h.deleteSnapshot(handle))
	}
	if left := h.images(); len(left) > 0 {
		t.Errorf("there are still %v", left)
	}
}
