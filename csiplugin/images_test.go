package csiplugin_test

import (
	"bytes"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin"
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
