package csiplugin_test

import (
	"bytes"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// imageScenario is something that ends with an image, and with a volume that was made from it.
type imageScenario struct {
	method string
	// act does it once, and returns the handle that volumes can be made from.
	act func(h *host, volume, server string) (handle string, err error)
	// files is how many files the image has in the end, places how many places there are to die in at least.
	files, places int
}

func snapshotImage(format string) func(h *host, volume, _ string) (string, error) {
	return func(h *host, volume, _ string) (string, error) {
		for ; ; time.Sleep(sidecarPause) {
			resp, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{
				Name: "image", SourceVolumeId: volume, Parameters: map[string]string{"type": "bi", "export-type": format},
			})
			if status.Code(err) != codes.Aborted && (err != nil || resp.GetSnapshot().GetReadyToUse()) {
				return resp.GetSnapshot().GetSnapshotId(), err
			}
		}
	}
}

func restoreImage(handle func(volume, server string) string) func(h *host, volume, server string) (string, error) {
	return func(h *host, volume, server string) (string, error) {
		_, err := h.restore("restored", handle(volume, server), 0)
		return handle(volume, server), err
	}
}

var imageScenarios = map[string]imageScenario{
	"download of a raw image": {csi.Controller_CreateVolume_FullMethodName, restoreImage(func(_, server string) string {
		return onDemand("image", server+"/raw")
	}), 0, 12},
	"download of a qcow2 image": {csi.Controller_CreateVolume_FullMethodName, restoreImage(func(_, server string) string {
		return onDemand("image", server+"/disk.qcow2")
	}), 0, 12},
	"export to qcow2 on demand": {csi.Controller_CreateVolume_FullMethodName, restoreImage(func(volume, _ string) string {
		return exported("image", volume, "qcow2")
	}), 1, 15},
	"snapshot to raw":   {csi.Controller_CreateSnapshot_FullMethodName, snapshotImage("raw"), 0, 6},
	"snapshot to qcow2": {csi.Controller_CreateSnapshot_FullMethodName, snapshotImage("qcow2"), 1, 10},
	"deletion of a snapshot that is an image": {csi.Controller_DeleteSnapshot_FullMethodName, func(h *host, volume, server string) (string, error) {
		handle, err := snapshotImage("qcow2")(h, volume, server)
		if err != nil {
			return handle, err
		}
		if err := h.deleteSnapshot(handle); err != nil {
			return handle, err
		}
		return snapshotImage("qcow2")(h, volume, server)
	}, 1, 3},
}

// files serves a raw image and a qcow2 image.
func files(t testing.TB, disk []byte) *backingtest.Server {
	packed := backingtest.QCOW2(int64(len(disk)), disk)
	return backingtest.Serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		content := disk
		if strings.HasSuffix(r.URL.Path, ".qcow2") {
			content = packed
		}
		backingtest.File(content)(n, w, r)
	})
}

// TestPreparingAnImageSurvivesAKill kills the plugin between any two steps. After the next start the same call ends with a whole
// image, and nothing is left of the first attempt.
func TestPreparingAnImageSurvivesAKill(t *testing.T) {
	priv.Root(t)
	disk := golden(16 * mib)
	s := files(t, disk)
	for name, scenario := range imageScenarios {
		t.Run(name, func(t *testing.T) {
			pools := scratch.Filesystem(t, "xfs", 2*gib)
			for at := 0; ; at++ {
				place := scenario.run(t, filepath.Join(pools, fmt.Sprint("pool-", at)), at, s.URL, disk)
				if place == "" {
					if at < scenario.places {
						t.Errorf("there are only %d places, there were %d", at, scenario.places)
					}
					return
				}
			}
		})
	}
}

func (s imageScenario) run(t *testing.T, pool string, at int, server string, disk []byte) (place string) {
	t.Helper()
	h := prepareHost(t, pool)
	h.cfg.Images = fromHere
	h.start()
	v := h.create("v", mounted("ext4"), nil)
	write(t, v.file(), disk, 0)
	h.stop()
	end := h.startChild(s.method, at)
	_, err := s.act(h, v.id, server)
	place = end()
	if place == "" {
		must(t, err)
	} else {
		wantCode(t, err, codes.Unavailable)
	}
	h.start()
	handle, err := s.act(h, v.id, server)
	if err != nil {
		t.Fatalf("killed at %q: %v", place, err)
	}
	h.restored("restored", handle, 0, disk)
	if got := h.imageFiles(); len(got) != s.files {
		t.Errorf("killed at %q: there are the files %v", place, got)
	}
	if got := h.objects(); len(got) != 3 {
		t.Errorf("killed at %q: there are the objects %v", place, got)
	}
	must(t, h.deleteSnapshot(handle))
	h.deleteAll()
	if got := append(h.objects(), h.imageFiles()...); len(got) > 0 {
		t.Errorf("killed at %q: left behind are %v", place, got)
	}
	h.stop()
	return place
}

// TestAKillInTheMiddleOfAPhase kills the plugin while it downloads, and while a child of it converts. The child dies with it.
func TestAKillInTheMiddleOfAPhase(t *testing.T) {
	priv.Root(t)
	disk := bytes.Repeat(golden(16 * mib)[mib/2:mib], 256)
	packed := backingtest.QCOW2(int64(len(disk)), disk)
	for name, state := range map[string]string{"download": "downloading", "conversion": "converting"} {
		t.Run(name, func(t *testing.T) {
			stall := name == "download"
			release := make(chan struct{})
			s := backingtest.Serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
				if !stall || n > 1 {
					backingtest.File(packed)(n, w, r)
					return
				}
				w.Header().Set("Content-Length", fmt.Sprint(len(packed)))
				_, _ = w.Write(packed[:len(packed)/2])
				<-release
			})
			h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
			h.cfg.Images = fromHere
			end := h.startChild("", -1)
			handle := onDemand("image", s.URL+"/disk.qcow2")
			restored := make(chan error, 1)
			go func() {
				_, err := h.restore("v", handle, 0)
				restored <- err
			}()
			for seen := ""; seen != state; {
				seen = h.images()["image"].GetState()
				if seen == "ready" {
					t.Fatalf("it was never seen %s", state)
				}
			}
			h.stop() // by SIGKILL
			close(release)
			wantCode(t, <-restored, codes.Unavailable)
			end()
			h.start()
			h.restored("v", handle, 0, disk)
			if got := append(h.objects(), h.imageFiles()...); len(got) != 2 {
				t.Errorf("there are %v", got)
			}
		})
	}
}

// TestAStopInTheMiddleOfADownloadIsQuick ends the plugin in the regular way.
func TestAStopInTheMiddleOfADownloadIsQuick(t *testing.T) {
	h := newImagesHost(t)
	disk := golden(20 * mib)
	started, stall := make(chan struct{}, 8), true
	s := backingtest.Serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		if stall {
			started <- struct{}{}
			<-r.Context().Done()
			return
		}
		backingtest.File(disk)(n, w, r)
	})
	handle := onDemand("image", s.URL)
	_, err := h.control.CreateVolume(h.call(), cloneRequest("v", snapshotSource(handle), 0))
	wantCode(t, err, codes.Aborted, "downloading")
	<-started
	h.stop()
	stall = false
	h.start()
	h.restored("v", handle, 0, disk)
	t.Run("and so is a deletion", func(t *testing.T) {
		stall = true
		other := onDemand("other", s.URL)
		_, err := h.control.CreateVolume(h.call(), cloneRequest("w", snapshotSource(other), 0))
		wantCode(t, err, codes.Aborted, "downloading")
		must(t, h.deleteSnapshot(other))
		if got := h.images(); len(got) != 1 {
			t.Errorf("there are the images %v", got)
		}
		if files := h.imageFiles(); len(files) > 0 {
			t.Errorf("files are left: %v", files)
		}
	})
}
