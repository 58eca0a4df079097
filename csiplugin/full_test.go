package csiplugin_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// TestAFullPool fills the pool's filesystem to the last block and then goes on.
func TestAFullPool(t *testing.T) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			h := newHostIn(t, filepath.Join(scratch.Filesystem(t, fstype, 320*mib), "pool"))
			staged, used := h.create("staged", mounted("ext4"), nil), h.create("used", mounted("ext4"), nil)
			sandboxed, spare := h.create("sandboxed", mounted("ext4"), nil), h.create("spare", mounted("ext4"), nil)
			must(t, staged.stage(), used.stage(), sandboxed.stage(), used.publish("used"), os.WriteFile(h.path("used/file"), []byte("data"), 0o600))
			scratch.Run(t, "sync", "-f", h.path("used/file"))
			_, err := sandboxed.deferTo("s", false)
			must(t, err)
			big := h.sized("big", block(), 250*mib)
			must(t, os.Mkdir(filepath.Join(h.pool, "names"), 0o700))
			scratch.Fill(t, filepath.Join(h.pool, "fill"))
			scratch.FillNames(t, filepath.Join(h.pool, "names"))

			// What takes something says that there is nothing, sooner or later, and harms nothing.
			full := codes.OK
			for i := 0; full == codes.OK && i < 3000; i++ {
				req := createRequest("more" + time.Duration(i).String())
				_, err := h.control.CreateVolume(h.call(), req)
				full = status.Code(err)
			}
			if full != codes.ResourceExhausted {
				t.Errorf("creating volumes ends with %v", full)
			}
			wantCode(t, staged.publish("t"), codes.ResourceExhausted)
			for i := 0; ; i++ {
				_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: fmt.Sprint("s", i), SourceVolumeId: used.id})
				if err != nil || i > 3000 {
					wantCode(t, err, codes.ResourceExhausted)
					break
				}
			}
			health, err := h.node.NodeGetVolumeHealth(h.call(), &csi.NodeGetVolumeHealthRequest{VolumeId: used.id})
			if got := health.GetVolumeHealth().GetHealthStatuses(); err != nil || len(got) != 1 || got[0].GetReason() != "PoolFull" {
				t.Errorf("the health is %v, %v", health, err)
			}
			_, err = h.identity.Probe(h.call(), &csi.ProbeRequest{})
			wantCode(t, err, codes.OK)

			// What gives something back works, also after a restart.
			h.stop()
			h.start()
			if got := string(read(t, h.path("used/file"))); got != "data" {
				t.Errorf("the data is %q", got)
			}
			must(t, used.unpublish("used"), used.unstage(), sandboxed.undefer("s", true), sandboxed.unstage(), spare.delete())
			must(t, big.delete(), os.Remove(filepath.Join(h.pool, "fill")), os.RemoveAll(filepath.Join(h.pool, "names")))
			h.waitForSpace(64 * mib)
			must(t, staged.publish("t"), staged.unpublish("t"), used.stage(), used.publish("used"))
			if got := string(read(t, h.path("used/file"))); got != "data" {
				t.Errorf("the data is %q", got)
			}
			must(t, used.unpublish("used"), used.unstage(), used.delete())
		})
	}
}

// waitForSpace waits until the pool can be written to again; btrfs takes a moment.
func (h *host) waitForSpace(size int64) {
	h.t.Helper()
	path := filepath.Join(h.root(), "probe")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		f, err := os.Create(path)
		if err == nil {
			_, err = f.Write(make([]byte, size))
			_ = f.Close()
		}
		_ = os.Remove(path)
		if err == nil {
			return
		}
		scratch.Run(h.t, "sync", "-f", h.root())
		if time.Now().After(deadline) {
			h.t.Fatal(err)
		}
	}
}

func TestAStartOnAFullDiskSaysSo(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "xfs", 320*mib)
	scratch.Fill(t, filepath.Join(dir, "full"))
	h := prepareHost(t, filepath.Join(dir, "pool"))
	if err := h.plugin().Run(t.Context()); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("got %v", err)
	}
	must(t, os.Remove(filepath.Join(dir, "full")))
	h.start()
	h.create("a", mounted("ext4"), nil)
}
