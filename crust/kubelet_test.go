package crust_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/crust/internal/sptest"
	"crust.dev/crust/test/priv"
)

// pod is what a kubelet does for one volume of one pod (pkg/volume/csi/csi_mounter.go and kubelet_volumes.go of Kubernetes
// v1.36). Names are those of Kubernetes.
type pod struct {
	n       *node
	volume  string
	uid     string
	fsGroup int // 0: none
}

func (p pod) volumeDir() string {
	return p.n.path("pods", p.uid, "volumes", "kubernetes.io~csi", "pv-"+p.volume)
}
func (p pod) target() string   { return filepath.Join(p.volumeDir(), "mount") }
func (p pod) dataFile() string { return filepath.Join(p.volumeDir(), "vol_data.json") }

// setUpAt makes the parent and the data file, publishes, and gives the directory to the group. A final error removes what
// it has made, without NodeUnpublishVolume; any other leaves it.
func (p pod) setUpAt(ctx context.Context) error {
	if err := os.MkdirAll(p.volumeDir(), 0o750); err != nil {
		return err
	}
	if err := os.WriteFile(p.dataFile(), []byte(`{"volumeHandle":"`+p.volume+`"}`), 0o600); err != nil {
		return err
	}
	_, err := p.n.csi().NodePublishVolume(ctx, publishRequest(p.volume, p.target()))
	if err == nil {
		return p.setVolumeOwnership()
	}
	if !uncertain(err) {
		if cleanUp := p.removeMountDir(); cleanUp != nil {
			return errors.Join(err, fmt.Errorf("the kubelet could not clean up: %w", cleanUp))
		}
	}
	return err
}

// uncertain errors are those after which a kubelet believes that the volume may be mounted (IsFinalError).
func uncertain(err error) bool {
	return slices.Contains([]codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted}, status.Code(err))
}

// setVolumeOwnership walks the directory: a missing one fails the pod, a failed chown or chmod is only logged.
func (p pod) setVolumeOwnership() error {
	if p.fsGroup == 0 {
		return nil
	}
	return filepath.WalkDir(p.target(), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := errors.Join(os.Lchown(path, -1, p.fsGroup), os.Chmod(path, 0o770|os.ModeSetgid)); err != nil {
			p.n.t.Logf("a kubelet would log: %v", err)
		}
		return nil
	})
}

// tearDownAt unpublishes and removes what setUpAt has made.
func (p pod) tearDownAt(ctx context.Context) error {
	if err := p.n.unpublishWithin(ctx, p.volume, p.target()); err != nil {
		return err
	}
	return p.removeMountDir()
}

// removeMountDir removes nothing, without an error, as long as something is mounted; then the pod stays, Terminating.
func (p pod) removeMountDir() error {
	mounted, err := mountinfo.Mounted(p.target())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if mounted {
		return nil
	}
	for _, path := range []string{p.target(), p.dataFile(), p.volumeDir()} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// gone is nil if nothing of the pod's volume is left on the node, so that the kubelet forgets the pod.
func (p pod) gone() error {
	if _, err := os.Lstat(p.volumeDir()); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is still there (%v)", p.volumeDir(), err)
	}
	return nil
}

func (n *node) unpublishWithin(ctx context.Context, volume, target string) error {
	_, err := n.csi().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target})
	return err
}

// staging is what a kubelet stages and unstages a volume with.
func (n *node) stage(volume string) error {
	req := publishRequest(volume, "/unused")
	_, err := n.csi().NodeStageVolume(n.t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: volume, StagingTargetPath: n.path("globalmount"), VolumeCapability: req.GetVolumeCapability(), VolumeContext: req.GetVolumeContext(),
	})
	return err
}

func (n *node) unstage(volume string) error {
	_, err := n.csi().NodeUnstageVolume(n.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: n.path("globalmount")})
	return err
}

// TestKubelet plays a kubelet's habits, good and bad, through real sockets.
func TestKubelet(t *testing.T) {
	priv.Root(t)
	for _, tc := range []struct {
		name string
		play func(t *testing.T, n *node, p pod)
	}{
		{"a pod's life", podsLife},
		{"publish again and again on a running pod", publishOnRunningPod},
		{"publish cancelled, and the pod deleted", publishCancelled},
		{"publish fails, and nobody unpublishes", publishFails},
		{"unpublish twice", unpublishTwice},
		{"unstage is lost", unstageLost},
		{"unstage while the VM holds the device", unstageWhileHeld},
		{"expand between publish and sandbox", expandBeforeSandbox},
		{"stats before the sandbox", statsBeforeSandbox},
		{"the directory of an orphan is removed behind our back", orphanRemoved},
		{"the pod's data file is lost, so that nobody unpublishes", dataFileLost},
		{"raw block", rawBlock},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t)
			n.driver.Volume(t, "v1", 64<<20)
			tc.play(t, n, pod{n: n, volume: "v1", uid: "uid-1", fsGroup: 1234})
		})
	}
}

func check(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func podsLife(t *testing.T, n *node, p pod) {
	check(t, "stage", n.stage("v1"))
	check(t, "set up", p.setUpAt(t.Context()))
	var st unix.Stat_t
	check(t, "stat", unix.Stat(p.target(), &st))
	if st.Gid != 1234 || st.Mode&0o7777 != 0o2770 {
		t.Errorf("after the kubelet's fsGroup the target has group %d, mode %o", st.Gid, st.Mode)
	}
	s := n.sandbox("s1", nil)
	_, err := s.mount(t.Context(), p.target())
	check(t, "mount", err)
	check(t, "release", s.client.Released(t.Context(), p.target()))
	check(t, "tear down", p.tearDownAt(t.Context()))
	check(t, "unstage", n.unstage("v1"))
	check(t, "gone", p.gone())
}

func publishOnRunningPod(t *testing.T, n *node, p pod) {
	check(t, "set up", p.setUpAt(t.Context()))
	s := n.sandbox("s1", nil)
	_, err := s.mount(t.Context(), p.target())
	check(t, "mount", err)
	n.driver.Calls()
	for range 3 {
		check(t, "set up again", p.setUpAt(t.Context())) // every kubelet restart does this
		n.restart()
	}
	if calls := n.driver.Calls(); slices.Contains(calls, "NodePublishVolume") || slices.Contains(calls, "NodeUnpublishVolume") {
		t.Errorf("the driver was bothered: %v", calls)
	}
	eventually(t, "stats of the running pod", func() error {
		_, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v1", VolumePath: p.target()})
		return err
	})
}

func publishCancelled(t *testing.T, n *node, p pod) {
	n.driver.Before(func(ctx context.Context, method string) error {
		if method == "NodePublishVolume" {
			return sptest.Hang(ctx, method)
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := p.setUpAt(ctx); !uncertain(err) {
		t.Fatalf("set up: %v", err)
	}
	n.driver.Before(nil)
	eventually(t, "tear down", func() error { return p.tearDownAt(t.Context()) })
	check(t, "gone", p.gone())
	if left := n.driver.Published(); len(left) > 0 {
		t.Errorf("the driver still has %v", left)
	}
}

func publishFails(t *testing.T, n *node, p pod) {
	before := worldNow(t, n)
	n.driver.Before(func(_ context.Context, method string) error {
		if method == "NodePublishVolume" {
			return status.Error(codes.FailedPrecondition, "no")
		}
		return nil
	})
	wantKind(t, p.setUpAt(t.Context()), errdefs.ErrFailedPrecondition, "no")
	check(t, "gone", p.gone())
	if diff := cmp.Diff(before, worldNow(t, n)); diff != "" {
		t.Errorf("the failed publish has left something: %s", diff)
	}
	n.driver.Before(nil)
	check(t, "the next pod", pod{n: n, volume: "v1", uid: "uid-2"}.setUpAt(t.Context()))
}

// worldNow looks at everything, with the daemon down for a moment.
func worldNow(t *testing.T, n *node) world {
	t.Helper()
	w := n.world(nil)
	n.start()
	return w
}

func unpublishTwice(t *testing.T, n *node, p pod) {
	check(t, "set up", p.setUpAt(t.Context()))
	for range 2 {
		check(t, "tear down", p.tearDownAt(t.Context()))
	}
	check(t, "gone", p.gone())
	check(t, "unpublish of what never was", n.unpublish("v1", n.path("pods", "other", "mount")))
}

func unstageLost(t *testing.T, n *node, p pod) {
	check(t, "stage", n.stage("v1"))
	check(t, "set up", p.setUpAt(t.Context()))
	check(t, "tear down", p.tearDownAt(t.Context()))
	n.restart()
	check(t, "stage again", n.stage("v1"))
	check(t, "set up of the next pod", pod{n: n, volume: "v1", uid: "uid-2"}.setUpAt(t.Context()))
}

func unstageWhileHeld(t *testing.T, n *node, p pod) {
	check(t, "stage", n.stage("v1"))
	check(t, "set up", p.setUpAt(t.Context()))
	s := n.sandbox("s1", nil)
	_, err := s.mount(t.Context(), p.target())
	check(t, "mount", err)
	n.driver.Calls()
	wantKind(t, p.tearDownAt(t.Context()), errdefs.ErrFailedPrecondition, "s1")
	wantKind(t, n.unstage("v1"), errdefs.ErrFailedPrecondition, "still published")
	if calls := n.driver.Calls(); len(calls) > 0 {
		t.Errorf("the driver has heard of it: %v", calls)
	}
	check(t, "release", s.client.Released(t.Context(), p.target()))
	check(t, "tear down", p.tearDownAt(t.Context()))
	check(t, "unstage", n.unstage("v1"))
	check(t, "gone", p.gone())
}

func expandBeforeSandbox(t *testing.T, n *node, p pod) {
	check(t, "set up", p.setUpAt(t.Context()))
	resp, err := n.csi().NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: "v1", VolumePath: p.target(), StagingTargetPath: n.path("globalmount"), CapacityRange: &csi.CapacityRange{RequiredBytes: 128 << 20},
	})
	check(t, "expand", err)
	if resp.GetCapacityBytes() != 128<<20 {
		t.Errorf("expanded to %d", resp.GetCapacityBytes())
	}
	n.restart()
	s := n.sandbox("s1", nil)
	resolved, err := s.mount(t.Context(), p.target())
	check(t, "mount", err)
	if size := resolved[0].Deferral.SizeBytes; size != 128<<20 {
		t.Errorf("the sandbox is told of %d bytes", size)
	}
}

func statsBeforeSandbox(t *testing.T, n *node, p pod) {
	check(t, "set up", p.setUpAt(t.Context()))
	_, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v1", VolumePath: p.target()})
	wantKind(t, err, errdefs.ErrUnavailable, "no sandbox has mounted it")
}

// orphanRemoved: cleanupOrphanedPodDirs removes the directory of a pod that nobody knows, if nothing is mounted there. The
// seal is, so it stays until the daemon has given the volume back.
func orphanRemoved(t *testing.T, n *node, p pod) {
	check(t, "set up", p.setUpAt(t.Context()))
	if err := os.Remove(p.target()); !errors.Is(err, unix.EBUSY) {
		t.Errorf("the kubelet has removed a sealed directory: %v", err)
	}
	// Somebody unmounts it first.
	check(t, "unmount", unix.Unmount(p.target(), unix.MNT_DETACH))
	check(t, "remove", os.RemoveAll(n.path("pods", p.uid)))
	n.restart() // the daemon may have begun to give the volume back before that
	eventually(t, "the driver to have the volume back", func() error {
		if _, ok := n.driver.Published()[p.target()]; ok {
			return errors.New("it is still published")
		}
		return nil
	})
	eventually(t, "the volume to be free", func() error { return pod{n: n, volume: "v1", uid: "uid-2"}.setUpAt(t.Context()) })
}

func dataFileLost(t *testing.T, n *node, p pod) {
	check(t, "set up", p.setUpAt(t.Context()))
	check(t, "lose it", os.Remove(p.dataFile()))
	// A second pod is refused with what is in the way, and it is given back by hand.
	err := pod{n: n, volume: "v1", uid: "uid-2"}.setUpAt(t.Context())
	wantKind(t, err, errdefs.ErrFailedPrecondition, p.target())
	check(t, "unpublish by hand", n.unpublish("v1", p.target()))
	check(t, "the second pod", pod{n: n, volume: "v1", uid: "uid-2"}.setUpAt(t.Context()))
}

func rawBlock(t *testing.T, n *node, p pod) {
	req := publishRequest("v1", p.target())
	req.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	check(t, "mkdir", os.MkdirAll(p.volumeDir(), 0o750))
	_, err := n.csi().NodePublishVolume(t.Context(), req)
	wantKind(t, err, errdefs.ErrFailedPrecondition, "volumeMode Block")
	if calls := n.driver.Calls(); len(calls) > 0 {
		t.Errorf("the driver has heard of it: %v", calls)
	}
}
