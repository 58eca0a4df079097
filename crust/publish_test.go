package crust_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/crust/internal/sptest"
	"crust.dev/crust/protocol/csi/deferred"
)

func TestPublish(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	if info, err := os.Stat(target); err != nil || !info.IsDir() {
		t.Errorf("target path: %v", err)
	}
	if diff := cmp.Diff(map[string]string{target: "v1"}, n.driver.Published()); diff != "" {
		t.Error(diff)
	}
	n.driver.Calls()

	t.Run("again is cheap", func(t *testing.T) {
		req := publishRequest("v1", target)
		req.Secrets["password"] = "rotated"
		req.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"] = "rotated"
		if _, err := n.csi().NodePublishVolume(t.Context(), req); err != nil {
			// the token was not there at first, yet its coming and going is not a change of the request
			t.Fatal(err)
		}
		if calls := n.driver.Calls(); len(calls) != 0 {
			t.Errorf("the driver was called: %v", calls)
		}
	})
	t.Run("with other arguments", func(t *testing.T) {
		req := publishRequest("v1", target)
		req.Readonly = true
		_, err := n.csi().NodePublishVolume(t.Context(), req)
		wantKind(t, err, errdefs.ErrAlreadyExists, "other arguments")
	})
	t.Run("another volume at the same path", func(t *testing.T) {
		n.driver.Volume(t, "v2", 1<<20)
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v2", target))
		wantKind(t, err, errdefs.ErrAlreadyExists, "belongs to volume v1")
	})
	t.Run("the same volume at another path", func(t *testing.T) {
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", n.target("pod2")))
		wantKind(t, err, errdefs.ErrFailedPrecondition, "ReadWriteOncePod")
	})
	t.Run("the same device under another name", func(t *testing.T) {
		if err := os.Link(filepath.Join(n.driver.Dir, "v1.img"), filepath.Join(n.driver.Dir, "alias.img")); err != nil {
			t.Fatal(err)
		}
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("alias", n.target("pod3")))
		wantKind(t, err, errdefs.ErrFailedPrecondition, "one device can have one user only")
		if diff := cmp.Diff(map[string]string{target: "v1"}, n.driver.Published()); diff != "" {
			t.Errorf("not undone at the driver:\n%s", diff)
		}
	})
	t.Run("survives a restart of the daemon", func(t *testing.T) {
		n.restart()
		if _, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target)); err != nil {
			t.Fatal(err)
		}
		if err := n.unpublish("v1", target); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(target); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("target path: %v", err)
		}
		if err := n.unpublish("v1", target); err != nil {
			t.Errorf("a second time: %v", err)
		}
		if published := n.driver.Published(); len(published) != 0 {
			t.Errorf("the driver still has %v", published)
		}
	})
	if log := n.log.String(); strings.Contains(log, "hunter2") || strings.Contains(log, "rotated") {
		t.Errorf("a secret is in the log:\n%s", log)
	}
	state, err := os.ReadFile(n.path("state", "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(state), "hunter2") {
		t.Error("a secret is in the journal")
	}
}

func TestReadOnlyUsersShareAVolume(t *testing.T) {
	n := newNode(t)
	n.driver.Volume(t, "v1", 1<<20)
	publish := func(pod string, readOnly bool) error {
		req := publishRequest("v1", n.target(pod))
		req.Readonly = readOnly
		_, err := n.csi().NodePublishVolume(t.Context(), req)
		return err
	}
	for _, pod := range []string{"a", "b"} {
		if err := publish(pod, true); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, publish("c", false), errdefs.ErrFailedPrecondition, "already published")
}

func TestPublishRefuses(t *testing.T) {
	n := newNode(t)
	n.driver.Volume(t, "v1", 1<<20)
	mode := func(m csi.VolumeCapability_AccessMode_Mode) func(*csi.NodePublishVolumeRequest) {
		return func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode.Mode = m }
	}
	answer := func(change func(*deferred.DeferredFilesystem)) func(*csi.NodePublishVolumeRequest) {
		return func(*csi.NodePublishVolumeRequest) { n.driver.Answer = change }
	}
	fifo, outside := filepath.Join(n.driver.Dir, "fifo"), filepath.Join(n.dir, "outside.img")
	mkfifo(t, fifo)
	if err := errors.Join(os.WriteFile(outside, make([]byte, 4096), 0o600), os.Symlink(outside, filepath.Join(n.driver.Dir, "link"))); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name   string
		change func(*csi.NodePublishVolumeRequest)
		kind   error
		text   string
	}{
		{"no volume id", func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "" }, errdefs.ErrInvalidArgument, "volume_id"},
		{"no target path", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" }, errdefs.ErrInvalidArgument, "target_path"},
		{"a relative target path", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "a/b" }, errdefs.ErrInvalidArgument, "not absolute"},
		{"a target path with dots", func(r *csi.NodePublishVolumeRequest) { r.TargetPath += "/../x" }, errdefs.ErrInvalidArgument, "clean"},
		{"the root directory", func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "/" }, errdefs.ErrInvalidArgument, "clean"},
		{"a relative staging path", func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = "a" }, errdefs.ErrInvalidArgument, "staging_target_path"},
		{"staging and target path alike", func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = r.TargetPath }, errdefs.ErrInvalidArgument, "both"},
		{"no capability", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil }, errdefs.ErrFailedPrecondition, "raw block"},
		{"no access mode", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode = nil }, errdefs.ErrInvalidArgument, "access_mode"},
		{"raw block", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		}, errdefs.ErrFailedPrecondition, "raw block"},
		{"writers on several nodes", mode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), errdefs.ErrFailedPrecondition, "ReadWriteOncePod"},
		{"one writer on several nodes", mode(csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER), errdefs.ErrFailedPrecondition, "ReadWriteOncePod"},
		{"readers on several nodes that may write", mode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY), errdefs.ErrFailedPrecondition, "ReadWriteOncePod"},
		{"a group by name", func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "staff" }, errdefs.ErrInvalidArgument, "staff"},
		{"a parameter that means nothing", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[deferred.ParameterDefer] = "yes" }, errdefs.ErrInvalidArgument, "yes"},
		{"auto without a pod reader", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[deferred.ParameterDefer] = "auto" }, errdefs.ErrFailedPrecondition, "pod reader"},
		{"a CO that speaks the extension", func(r *csi.NodePublishVolumeRequest) {
			if err := deferred.Set(r, &deferred.NodePublishVolumeRequestExtension{DeferFsOps: true}); err != nil {
				t.Fatal(err)
			}
		}, errdefs.ErrInvalidArgument, "defer_fs_ops"},
		{"a volume that the driver does not have", func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "none" }, errdefs.ErrNotFound, "no volume none"},
		{"a driver that cannot defer", func(*csi.NodePublishVolumeRequest) { n.driver.Capabilities = n.driver.Capabilities[:3] }, errdefs.ErrFailedPrecondition, "DEFER_FS_OPS"},
		{"a driver that changes the group", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.GetMount().VolumeMountGroup = "7"
			n.driver.Answer = func(d *deferred.DeferredFilesystem) { d.SupplementalGroup = "8" }
		}, errdefs.ErrInternal, "supplemental group"},
		{"a group change policy that means nothing", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext["crust.dev/fs-group-change-policy"] = "Sometimes"
		}, errdefs.ErrInvalidArgument, "Sometimes"},
		{"a handler that is not configured", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext["crust.dev/handler"] = "none" }, errdefs.ErrFailedPrecondition, "there is cli, kata, remote"},
		{"a driver that loses read-only", func(r *csi.NodePublishVolumeRequest) {
			r.Readonly = true
			n.driver.Answer = func(d *deferred.DeferredFilesystem) { d.ReadOnly = false }
		}, errdefs.ErrInternal, "read-only"},
		{"a driver that names no device", answer(func(d *deferred.DeferredFilesystem) { d.Device = "" }), errdefs.ErrInternal, "device is missing"},
		{"a relative device", answer(func(d *deferred.DeferredFilesystem) { d.Device = "v1.img" }), errdefs.ErrInternal, "absolute"},
		{"a device with dots", answer(func(d *deferred.DeferredFilesystem) { d.Device = "/dev/../etc/passwd" }), errdefs.ErrInternal, "clean"},
		{"a device that is not there", answer(func(d *deferred.DeferredFilesystem) { d.Device = "/nonexistent" }), errdefs.ErrFailedPrecondition, "/nonexistent"},
		{"a device that is a directory", answer(func(d *deferred.DeferredFilesystem) { d.Device = n.driver.Dir }), errdefs.ErrFailedPrecondition, "neither"},
		{"a device that is a character device", answer(func(d *deferred.DeferredFilesystem) { d.Device = "/dev/null" }), errdefs.ErrFailedPrecondition, "neither"},
		{"a device that is a pipe", answer(func(d *deferred.DeferredFilesystem) { d.Device = fifo }), errdefs.ErrFailedPrecondition, "neither"},
		{"a device outside of the roots", answer(func(d *deferred.DeferredFilesystem) { d.Device = outside }), errdefs.ErrPermissionDenied, "deviceRoots"},
		{"a link that leads out of the roots", answer(func(d *deferred.DeferredFilesystem) { d.Device = filepath.Join(n.driver.Dir, "link") }), errdefs.ErrPermissionDenied, "outside.img"},
		{"a size of zero", answer(func(d *deferred.DeferredFilesystem) { d.SizeBytes = 0 }), errdefs.ErrInternal, "size_bytes"},
		{"a device smaller than announced", answer(func(d *deferred.DeferredFilesystem) { d.SizeBytes = 1 << 40 }), errdefs.ErrFailedPrecondition, "announced"},
		{"no filesystem type", answer(func(d *deferred.DeferredFilesystem) { d.FsType = "" }), errdefs.ErrInternal, "fs_type"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			capabilities := n.driver.Capabilities
			defer func() { n.driver.Capabilities, n.driver.Answer = capabilities, nil }()
			target := n.target("refused")
			req := publishRequest("v1", target)
			tc.change(req)
			_, err := n.csi().NodePublishVolume(t.Context(), req)
			wantKind(t, err, tc.kind, tc.text)
			if published := n.driver.Published(); len(published) != 0 {
				t.Errorf("the driver still has %v", published)
			}
			if _, err := os.Stat(target); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the target path is there: %v", err)
			}
			if left, err := os.ReadDir(filepath.Dir(target)); err != nil || len(left) != 0 {
				t.Errorf("left in the target's directory: %v, %v", left, err)
			}
		})
	}
	// Nothing of all that is in the way now.
	n.publish("v1", "refused")
}

func TestStageRefusesWhatPublishWould(t *testing.T) {
	n := newNode(t)
	n.driver.Capabilities = n.driver.Capabilities[:3]
	req := &csi.NodeStageVolumeRequest{
		VolumeId: "v1", StagingTargetPath: n.dir,
		VolumeCapability: publishRequest("", "").GetVolumeCapability(),
		VolumeContext:    map[string]string{deferred.ParameterDefer: "always"},
	}
	_, err := n.csi().NodeStageVolume(t.Context(), req)
	wantKind(t, err, errdefs.ErrFailedPrecondition, "DEFER_FS_OPS")
	if calls := n.driver.Calls(); len(calls) != 0 {
		t.Errorf("the driver was called, and may have mounted: %v", calls)
	}
	req.VolumeContext = nil
	if _, err := n.csi().NodeStageVolume(t.Context(), req); err != nil {
		t.Errorf("without deferral: %v", err)
	}
}

func TestFailedPublishIsUndone(t *testing.T) {
	n := newNode(t)
	n.driver.Volume(t, "v1", 1<<20)
	target := n.target("pod")
	fail := func(methods ...string) func(context.Context, string) error {
		return func(_ context.Context, method string) error {
			if slices.Contains(methods, method) {
				return status.Error(codes.PermissionDenied, "no: "+method)
			}
			return nil
		}
	}
	t.Run("with the driver's own code", func(t *testing.T) {
		n.driver.Before(fail("NodePublishVolume"))
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target))
		wantKind(t, err, errdefs.ErrPermissionDenied, "no: NodePublishVolume")
		if diff := cmp.Diff([]string{"NodePublishVolume", "NodeUnpublishVolume"}, n.driver.Calls()); diff != "" {
			t.Errorf("calls: %s", diff)
		}
	})
	t.Run("if that fails too the code is one after which a kubelet tries again", func(t *testing.T) {
		n.driver.Before(fail("NodePublishVolume", "NodeUnpublishVolume"))
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target))
		wantKind(t, err, errdefs.ErrUnavailable, "no: NodeUnpublishVolume")
	})
	t.Run("and the next attempt succeeds", func(t *testing.T) {
		n.driver.Before(nil)
		if _, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target)); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a caller that gives up", func(t *testing.T) {
		if err := n.unpublish("v1", target); err != nil {
			t.Fatal(err)
		}
		n.driver.Before(func(ctx context.Context, method string) error {
			if method == "NodePublishVolume" {
				return sptest.Hang(ctx, method)
			}
			return nil
		})
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if _, err := n.csi().NodePublishVolume(ctx, publishRequest("v1", target)); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("publish: %v", err)
		}
		n.driver.Before(nil)
		// The call goes on behind the caller's back until it is undone.
		eventually(t, "the clean-up", func() error {
			if _, err := os.Stat(target); !errors.Is(err, os.ErrNotExist) {
				return errors.New("the target path is still there")
			}
			_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target))
			return err
		})
	})
}

// TestRuntimeThatIgnoresDeferrals: what a container would get is the seal.
func TestRuntimeThatIgnoresDeferrals(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	if err := os.WriteFile(filepath.Join(target, "stray"), []byte("data"), 0o600); err == nil {
		t.Error("the container has written to the node")
	}
	// The seal is gone after a reboot, and the kubelet publishes again.
	if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if _, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(target, "stray"), []byte("data"), 0o600); err == nil {
		t.Error("the container has written to the node after a reboot")
	}
}

func TestTargetWithStrangersFiles(t *testing.T) {
	n := newNode(t)
	n.driver.Volume(t, "v1", 1<<20)
	target := n.target("pod1")
	if err := os.Mkdir(target, 0o750); err != nil {
		t.Fatal(err)
	}
	stray := filepath.Join(target, "stray")
	if err := os.WriteFile(stray, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target))
	wantKind(t, err, errdefs.ErrFailedPrecondition, "not empty")
	if content, err := os.ReadFile(stray); err != nil || string(content) != "data" {
		t.Errorf("the file is now %q, %v", content, err)
	}
	if err := os.Remove(stray); err != nil {
		t.Fatal(err)
	}
	if _, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", target)); err != nil {
		t.Error(err)
	}
}

// TestSubPath: the kubelet makes the directory in the target path and hands over a bind mount of it made elsewhere.
func TestSubPath(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	if err := os.MkdirAll(filepath.Join(target, "logs", "app"), 0o750); err != nil {
		t.Fatal(err)
	}
	bind := n.path("pods", "pod1", "volume-subpaths", "pv", "app", "0")
	if err := os.MkdirAll(bind, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(filepath.Join(target, "logs", "app"), bind, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(bind, unix.MNT_DETACH) }()
	s := n.sandbox("s1", nil)
	resolved, err := s.mount(t.Context(), "/etc", bind)
	if err != nil {
		t.Fatal(err)
	}
	if len(resolved) != 1 || resolved[0].Index != 1 || resolved[0].SubPath != "logs/app" || resolved[0].Deferral.TargetPath != target {
		t.Errorf("resolved %+v", resolved)
	}
	if err := s.client.Released(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	if err := n.unpublish("v1", target); err != nil {
		t.Fatal(err)
	}
	// The bind mount outlives the volume: it must not be taken for an ordinary directory.
	_, err = s.mount(t.Context(), bind)
	wantKind(t, err, errdefs.ErrFailedPrecondition, "no longer published")
}
