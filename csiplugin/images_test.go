package csiplugin_test

import (
	"bytes"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/internal/scratch"
	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
	"crust.dev/crust/test/priv"
)

// fromHere lets images come from servers of a test.
var fromHere = csiplugin.ImagesConfig{AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}

// newImagesHost is newHost with images from servers of the test.
func newImagesHost(t testing.TB) *host {
	t.Helper()
	priv.Root(t)
	h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
	h.cfg.Images = fromHere
	h.start()
	return h
}

// golden is what is on an image's disk: data, and zeros.
func golden(size int) []byte {
	r := rand.NewChaCha8([32]byte{1})
	b := make([]byte, size)
	_, _ = r.Read(b[mib/2 : mib])
	_, _ = r.Read(b[size-8192:])
	return b
}

func sha(b []byte) string {
	sum := sha512.Sum512(b)
	return hex.EncodeToString(sum[:])
}

// onDemand is a handle of an image that is downloaded, with further pairs.
func onDemand(name, from string, more ...string) string {
	return "bi://backing?backingImageDataSourceType=download&backingImage=" + name + "&url=" + url.QueryEscape(from) + strings.Join(append([]string{""}, more...), "&")
}

// exported is a handle of an image that is exported from a volume.
func exported(name, volume, format string) string {
	return "bi://backing?backingImageDataSourceType=export-from-volume&backingImage=" + name + "&volume-name=" + volume + "&export-type=" + format
}

func (h *host) images() map[string]*imagesv1.Image {
	h.t.Helper()
	resp, err := imagesv1.NewImagesClient(h.conn).ListImages(h.call(), &imagesv1.ListImagesRequest{})
	must(h.t, err)
	found := map[string]*imagesv1.Image{}
	for _, img := range resp.GetImages() {
		found[img.GetName()] = img
	}
	return found
}

// restore does what a provisioner does: it asks again as long as it is told to.
func (h *host) restore(name, handle string, size int64) (*csi.Volume, error) {
	for {
		resp, err := h.control.CreateVolume(h.call(), cloneRequest(name, snapshotSource(handle), size))
		if status.Code(err) != codes.Aborted {
			return resp.GetVolume(), err
		}
	}
}

// restored restores a volume and holds it against what it should have.
func (h *host) restored(name, handle string, size int64, want []byte) *csi.Volume {
	h.t.Helper()
	v, err := h.restore(name, handle, size)
	must(h.t, err)
	got := read(h.t, h.file(v.GetVolumeId()))
	if int64(len(got)) != v.GetCapacityBytes() || len(got) < len(want) || !bytes.Equal(got[:len(want)], want) || len(bytes.Trim(got[len(want):], "\x00")) > 0 {
		h.t.Errorf("volume %s has another content than the image", name)
	}
	if v.GetContentSource().GetSnapshot().GetSnapshotId() != handle {
		h.t.Errorf("the content source that comes back is %v", v.GetContentSource())
	}
	return v
}

// imageFiles are the files in the making, and those of exports.
func (h *host) imageFiles() []string {
	h.t.Helper()
	entries, err := os.ReadDir(filepath.Join(h.root(), "images"))
	must(h.t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func TestAnImageIsDownloadedWhenAVolumeIsMadeFromIt(t *testing.T) {
	h := newImagesHost(t)
	disk := golden(20 * mib)
	for name, file := range map[string][]byte{
		"raw": disk, "odd": disk[:20*mib-100], "qcow2": backingtest.QCOW2(20*mib, disk),
	} {
		t.Run(name, func(t *testing.T) {
			want := disk[:min(len(file), len(disk))]
			s := backingtest.Serve(t, backingtest.File(file))
			from := s.URL + "/image?signature=confidential"
			handle := onDemand(name, from, "export-type="+map[bool]string{true: "qcow2", false: "raw"}[name == "qcow2"], "backingImageChecksum="+sha(file))
			first := h.restored(name+"-1", handle, 0, want)
			if first.GetCapacityBytes() != 20*mib {
				t.Errorf("the volume has %d bytes", first.GetCapacityBytes())
			}
			h.restored(name+"-2", handle, 40*mib, want)
			h.restored(name+"-3", "bi://backing?backingImageDataSourceType=download&backingImage="+name, 0, want)
			if n := len(s.Requests()); n != 1 {
				t.Errorf("it was downloaded %d times", n)
			}
			img := h.images()[name]
			if img.GetState() != "ready" || img.GetChecksum() != sha(file) || img.GetSizeBytes() != 20*mib || img.GetFileBytes() != int64(len(file)) {
				t.Errorf("it is listed as %v", img)
			}
			again, err := h.restore(name+"-1", handle, 0)
			if err != nil || again.GetVolumeId() != first.GetVolumeId() {
				t.Errorf("asked again: %v, %v", again, err)
			}
			_, err = h.restore(name+"-1", onDemand(name, from+"2", "export-type="+img.GetFormat()), 0)
			wantCode(t, err, codes.AlreadyExists)
		})
	}
	if files := h.imageFiles(); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
	volumes, err := h.control.ListVolumes(h.call(), &csi.ListVolumesRequest{})
	must(t, err)
	h.stop()
	for what, text := range map[string]string{"the log": h.log.String(), "the catalog": string(read(t, filepath.Join(h.root(), "catalog.db"))), "the list of volumes": volumes.String()} {
		if strings.Contains(text, "confidential") {
			t.Errorf("%s shows what gives access to a URL", what)
		}
	}
	for _, entry := range volumes.GetEntries() {
		if len(entry.GetVolume().GetVolumeContext()) > 0 {
			t.Errorf("the volume context is %v", entry.GetVolume().GetVolumeContext())
		}
	}
	h.start()
}

func TestWhatAVolumeCannotBeMadeFrom(t *testing.T) {
	h := newImagesHost(t)
	disk := golden(20 * mib)
	s := backingtest.Serve(t, backingtest.File(disk))
	good := onDemand("good", s.URL)
	h.restored("v", good, 0, disk)
	for name, row := range map[string]struct {
		handle string
		size   int64
		code   codes.Code
		text   string
	}{
		"less than the image":          {good, 16 * mib, codes.OutOfRange, "20971520"},
		"another URL":                  {onDemand("good", s.URL+"/other"), 0, codes.InvalidArgument, "url"},
		"another source":               {exported("good", "v", "raw"), 0, codes.InvalidArgument, "backingImageDataSourceType"},
		"another format":               {good + "&export-type=qcow2", 0, codes.InvalidArgument, "export-type"},
		"another checksum":             {good + "&backingImageChecksum=" + strings.Repeat("0", 128), 0, codes.InvalidArgument, "backingImageChecksum"},
		"an image that is gone":        {good + "&image-id=000000000000-img-" + strings.Repeat("0", 32), 0, codes.NotFound, "img-"},
		"a reference to nothing":       {"bi://backing?backingImageDataSourceType=download&backingImage=none", 0, codes.NotFound, "url"},
		"an export without format":     {"bi://backing?backingImageDataSourceType=export-from-volume&backingImage=none&volume-name=v", 0, codes.NotFound, "export-type"},
		"a volume that is not":         {exported("none", "nobody", "raw"), 0, codes.NotFound, "nobody"},
		"no handle":                    {"bi://backing?backingImage=x", 0, codes.InvalidArgument, "backingImageDataSourceType"},
		"another driver's handle":      {"bak://volume/backup", 0, codes.InvalidArgument, "bak://"},
		"an address of the node":       {onDemand("inside", "http://[::1]:1/"), 0, codes.PermissionDenied, "loopback"},
		"another checksum than it has": {onDemand("wrong", s.URL, "checksum="+strings.Repeat("0", 128)), 0, codes.InvalidArgument, "SHA-512"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.restore("new "+name, row.handle, row.size)
			wantCode(t, err, row.code, row.text)
		})
	}
	if got := h.objects(); len(got) != 2 {
		t.Errorf("there are the objects %v", got)
	}
	if files := h.imageFiles(); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
}

// TestAttacksByImagesAreRefused serves each of them, and lets volumes be made from it.
func TestAttacksByImagesAreRefused(t *testing.T) {
	h := newImagesHost(t)
	secret := filepath.Join(h.dir, "secret")
	must(t, os.WriteFile(secret, []byte("the node's own"), 0o600))
	for i, attack := range backingtest.Attacks(secret) {
		t.Run(attack.Name, func(t *testing.T) {
			s := backingtest.Serve(t, backingtest.File(attack.Image))
			_, err := h.restore(fmt.Sprint("v", i), onDemand(fmt.Sprint("image-", i), s.URL, "export-type="+string(attack.Declared)), 0)
			if code := status.Code(err); code != codes.InvalidArgument && code != codes.OutOfRange {
				t.Errorf("%s: got %v", attack.CVE, err)
			}
		})
	}
	if got := h.objects(); len(got) > 0 {
		t.Errorf("there are the objects %v", got)
	}
	if files := h.imageFiles(); len(files) > 0 {
		t.Errorf("files are left: %v", files)
	}
}

// TestAFullPoolTakesNoImage leaves nothing of the attempt, and prepares the image when there is space again.
func TestAFullPoolTakesNoImage(t *testing.T) {
	h := newImagesHost(t)
	disk := golden(20 * mib)
	s := backingtest.Serve(t, backingtest.File(disk))
	full := filepath.Join(h.root(), "..", "full")
	scratch.Fill(t, full)
	_, err := h.restore("v", onDemand("a", s.URL), 0)
	wantCode(t, err, codes.ResourceExhausted)
	if got := append(h.objects(), h.imageFiles()...); len(got) > 0 {
		t.Errorf("left behind are %v", got)
	}
	must(t, os.Remove(full))
	h.restored("v", onDemand("a", s.URL), 0, disk)
}

// TestMetricsOfImages reads them from the address that the plugin serves them on.
func TestMetricsOfImages(t *testing.T) {
	priv.Root(t)
	h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err, l.Close())
	h.cfg.Images, h.cfg.Metrics = fromHere, l.Addr().String()
	h.start()
	disk := golden(20 * mib)
	s := backingtest.Serve(t, backingtest.File(disk))
	h.restored("v", onDemand("a", s.URL), 0, disk)
	_, err = h.restore("w", onDemand("b", s.URL, "checksum="+strings.Repeat("0", 128)), 0)
	wantCode(t, err, codes.InvalidArgument)
	resp, err := http.Get("http://" + h.cfg.Metrics + "/metrics")
	must(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	must(t, err)
	for _, line := range []string{
		`crust_images{state="ready"} 1`, `crust_images{state="failed"} 1`, `crust_images{state="downloading"} 0`,
		`crust_image_preparations_total{result="ready"} 1`, `crust_image_preparations_total{result="failed"} 1`,
		fmt.Sprintf(`crust_image_prepared_bytes_total{phase="downloading"} %v`, float64(2*20*mib)),
	} {
		if !strings.Contains(string(text), line) {
			t.Errorf("%s is missing", line)
		}
	}
	if !strings.Contains(h.log.String(), "an image is ready") || !strings.Contains(h.log.String(), "an image could not be prepared") {
		t.Error("the log says nothing of it")
	}
}

func TestAFailureIsToldOnceAndTheNextCallBeginsAnew(t *testing.T) {
	h := newImagesHost(t)
	bad, good := []byte("\x1f\x8b\x08 packed"), golden(20*mib)
	content := bad
	s := backingtest.Serve(t, func(n int, w http.ResponseWriter, r *http.Request) { backingtest.File(content)(n, w, r) })
	handle := onDemand("a", s.URL)
	for range 2 {
		_, err := h.restore("v", handle, 0)
		wantCode(t, err, codes.InvalidArgument, "gzip")
	}
	if img := h.images()["a"]; img.GetState() != "failed" || !strings.Contains(img.GetError(), "gzip") {
		t.Errorf("it is listed as %v", img)
	}
	content = good
	h.restored("v", handle, 0, good)
	if img := h.images()["a"]; img.GetState() != "ready" || img.GetError() != "" {
		t.Errorf("it is listed as %v", img)
	}
}

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
			d.events, d.refuse = nil, row.refuse
			parameters := map[string]string{"type": "bi"}
			maps.Copy(parameters, row.parameters)
			_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id, Parameters: parameters})
			wantCode(t, err, row.code)
			if got := h.images()[name].GetConsistency(); got != row.want {
				t.Errorf("it is %q, want %q", got, row.want)
			}
			if len(d.events) != row.events {
				t.Errorf("the daemon was asked for %q", d.events)
			}
		})
	}
	v.giveBack("v")
}
