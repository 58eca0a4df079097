package csiplugin_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

func TestPublishOnTheHost(t *testing.T) {
	for _, pool := range []string{"xfs", "btrfs", "ext4"} {
		for _, fstype := range []string{"ext4", "xfs"} {
			t.Run(fstype+" in a pool on "+pool, func(t *testing.T) {
				h := newHost(t, pool)
				v := h.create("a", capability(multiWriter, &csi.VolumeCapability_MountVolume{FsType: fstype, MountFlags: []string{"noatime"}}), nil)
				must(t, v.stage(), v.publish("a"), v.publish("a"))
				must(t, os.WriteFile(h.path("a/file"), []byte("data"), 0o600))
				must(t, v.publish("b"))
				if got := string(read(t, h.path("b/file"))); got != "data" {
					t.Errorf("the second target shows %q", got)
				}
				if table := string(read(t, "/proc/self/mountinfo")); !strings.Contains(table, h.path("a")+" rw,noatime") {
					t.Errorf("the mount flags are missing: %s", table)
				}
				if got := h.devices(); len(got) != 1 {
					t.Errorf("the devices are %v", got)
				}
				must(t, v.unpublish("a"), v.unpublish("a"))
				if got := string(read(t, h.path("b/file"))); got != "data" {
					t.Errorf("the other target shows %q", got)
				}
				must(t, v.unpublish("b"))
				if got := append(h.mounts(), h.devices()...); len(got) > 0 {
					t.Errorf("after the last unpublish there are %v", got)
				}
				if _, err := os.Lstat(h.path("a")); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("the target is left: %v", err)
				}
				must(t, v.publish("a"))
				if got := string(read(t, h.path("a/file"))); got != "data" {
					t.Errorf("published again, it shows %q", got)
				}
				must(t, v.unpublish("a"), v.unstage(), v.delete())
			})
		}
	}
}

func TestPublishABlockDevice(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", block(), nil)
	must(t, v.stage(), v.publish("a"), v.publish("a"), v.publish("b"), v.publishReadOnly("ro"), v.publishReadOnly("ro"))
	dev, err := os.OpenFile(h.path("a"), os.O_RDWR|unix.O_DIRECT, 0)
	must(t, err)
	page := alignedPage()
	copy(page, "data")
	_, err = dev.WriteAt(page, 8192)
	must(t, err, dev.Sync(), dev.Close())
	if got := read(t, v.file())[8192:8196]; string(got) != "data" {
		t.Errorf("the volume holds %q", got)
	}
	if info, err := os.Lstat(h.path("b")); err != nil || info.Mode().Type()&os.ModeDevice == 0 {
		t.Errorf("the second target is %v, %v", info, err)
	}
	ro, err := os.OpenFile(h.path("ro"), os.O_RDWR, 0)
	if err == nil {
		_, err = ro.WriteAt([]byte("x"), 0)
		_ = ro.Close()
	}
	if err == nil {
		t.Error("a read-only device takes writes")
	}
	wantCode(t, v.publishReadOnly("a"), codes.AlreadyExists)
	must(t, v.unpublish("a"), v.unpublish("ro"), v.unpublish("b"), v.unpublish("b"))
	if got := append(h.mounts(), h.devices()...); len(got) > 0 {
		t.Errorf("after the last unpublish there are %v", got)
	}
	_, err = v.deferTo("t", false)
	wantCode(t, err, codes.InvalidArgument, "block")
	must(t, v.unstage(), v.delete())
}

// alignedPage is memory that direct I/O accepts.
func alignedPage() []byte {
	b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	return b
}

func TestReadOnlyIsHonoured(t *testing.T) {
	h := newHost(t, "xfs")
	shared := h.create("shared", mounted("ext4"), nil)
	must(t, shared.stage())
	// Nothing is formatted for somebody who only reads.
	wantCode(t, shared.publishReadOnly("r"), codes.FailedPrecondition, "read-only")
	must(t, shared.publish("w"), shared.publishReadOnly("r"))
	must(t, os.WriteFile(h.path("w/file"), nil, 0o600))
	if err := os.WriteFile(h.path("r/file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to the read-only target: %v", err)
	}
	wantCode(t, shared.publishReadOnly("w"), codes.AlreadyExists, h.path("w"))
	must(t, shared.unpublish("w"), shared.unpublish("r"), shared.unstage())

	// The same volume in a mode that only reads is not writable at its staging path either.
	shared.cap = capability(reader, &csi.VolumeCapability_MountVolume{})
	must(t, shared.stage(), shared.publish("r"))
	for _, path := range []string{h.path("r/x"), filepath.Join(shared.staging(), "x")} {
		if err := os.WriteFile(path, nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing to %s: %v", path, err)
		}
	}
	must(t, shared.unpublish("r"), shared.unstage())
}

// TestASecondPublish is the second table of CSI, NodePublishVolume.
func TestASecondPublish(t *testing.T) {
	h := newHost(t, "xfs")
	for name, c := range map[string]struct {
		mode                                                         csi.VolumeCapability_AccessMode_Mode
		sameTarget, sameTargetOther, otherTarget, otherTargetDiffers codes.Code
	}{
		"single writer": {onlyWriter, codes.OK, codes.AlreadyExists, codes.FailedPrecondition, codes.FailedPrecondition},
		"writer":        {writer, codes.OK, codes.AlreadyExists, codes.FailedPrecondition, codes.FailedPrecondition},
		"multi writer":  {multiWriter, codes.OK, codes.AlreadyExists, codes.OK, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			v := h.create(name, capability(c.mode, &csi.VolumeCapability_MountVolume{}), nil)
			must(t, v.stage(), v.publish("a"))
			wantCode(t, v.publish("a"), c.sameTarget)
			wantCode(t, v.publishReadOnly("a"), c.sameTargetOther)
			wantCode(t, v.publish("b"), c.otherTarget)
			wantCode(t, v.publishReadOnly("c"), c.otherTargetDiffers)
			must(t, v.unpublish("a"), v.unpublish("b"), v.unpublish("c"), v.unstage())
		})
	}
}

func TestNodePublishVolumeRefusesBadRequestsAndDoesNothing(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), map[string]string{deferred.ParameterDefer: "auto"})
	unstaged := h.create("unstaged", mounted("ext4"), nil)
	must(t, v.stage(), os.Mkdir(h.path("full"), 0o700), os.WriteFile(h.path("full/x"), nil, 0o600), os.WriteFile(h.path("file"), nil, 0o600), os.Mkdir(h.path("elsewhere"), 0o700))
	extend := func(m *csi.VolumeCapability_MountVolume, ext *deferred.MountVolumeExtension) {
		must(t, deferred.Set(m, ext))
	}
	for name, c := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		want   codes.Code
		text   string
	}{
		"no id":                   {func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "" }, codes.InvalidArgument, "volume_id"},
		"no such volume":          {func(r *csi.NodePublishVolumeRequest) { r.VolumeId = "none" }, codes.NotFound, ""},
		"another pool's volume":   {func(r *csi.NodePublishVolumeRequest) { r.VolumeId = handle.NewVolume("ffffffffffff").String() }, codes.NotFound, "ffffffffffff"},
		"not staged":              {func(r *csi.NodePublishVolumeRequest) { r.VolumeId, r.VolumeContext = unstaged.id, nil }, codes.FailedPrecondition, "not staged"},
		"no staging path":         {func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = "" }, codes.FailedPrecondition, "staging_target_path"},
		"a relative staging":      {func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = "stage" }, codes.InvalidArgument, "absolute"},
		"staged elsewhere":        {func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath = h.path("elsewhere") }, codes.FailedPrecondition, v.staging()},
		"no target":               {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "" }, codes.InvalidArgument, "target_path"},
		"a relative target":       {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = "t" }, codes.InvalidArgument, "absolute"},
		"a target with ..":        {func(r *csi.NodePublishVolumeRequest) { r.TargetPath += "/.." }, codes.InvalidArgument, ".."},
		"one path for both":       {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = r.StagingTargetPath + "/" }, codes.InvalidArgument, "both"},
		"no parent directory":     {func(r *csi.NodePublishVolumeRequest) { r.TargetPath += "/deep/er" }, codes.FailedPrecondition, "parent"},
		"a target with content":   {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = h.path("full") }, codes.FailedPrecondition, "hide"},
		"a target that is a file": {func(r *csi.NodePublishVolumeRequest) { r.TargetPath = h.path("file") }, codes.FailedPrecondition, "directory"},
		"no capability":           {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = nil }, codes.InvalidArgument, "volume_capability"},
		"no access type":          {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessType = nil }, codes.InvalidArgument, "access_type"},
		"another access mode":     {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode.Mode = writer }, codes.FailedPrecondition, "volume_capability"},
		"many nodes":              {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.AccessMode.Mode = 5 }, codes.FailedPrecondition, "MULTI_NODE"},
		"another filesystem":      {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().FsType = "xfs" }, codes.FailedPrecondition, "ext4"},
		"a block device":          {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = block() }, codes.FailedPrecondition, "block"},
		"other mount flags":       {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = []string{"noatime"} }, codes.FailedPrecondition, "volume_capability"},
		"a forbidden mount flag":  {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = []string{"move"} }, codes.InvalidArgument, "move"},
		"a group that is none":    {func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "-1" }, codes.InvalidArgument, "-1"},
		"another context": {func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = map[string]string{deferred.ParameterDefer: "never"}
		}, codes.InvalidArgument, "volume_context"},
		"a sandbox's group": {func(r *csi.NodePublishVolumeRequest) {
			extend(r.VolumeCapability.GetMount(), &deferred.MountVolumeExtension{VolumeSupplementalGroup: "5"})
		}, codes.InvalidArgument, "defer_fs_ops"},
		"a sandbox's policy": {func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.GetMount().VolumeMountGroup = "5"
			extend(r.VolumeCapability.GetMount(), &deferred.MountVolumeExtension{VolumeSupplementalGroupChangePolicy: "Always"})
		}, codes.InvalidArgument, "defer_fs_ops"},
		"two groups": {func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability.GetMount().VolumeMountGroup = "5"
			extend(r.VolumeCapability.GetMount(), &deferred.MountVolumeExtension{VolumeSupplementalGroup: "6"})
		}, codes.InvalidArgument, "contradicts"},
	} {
		t.Run(name, func(t *testing.T) {
			req := v.publishRequest("t")
			c.change(req)
			_, err := h.node.NodePublishVolume(h.call(), req)
			wantCode(t, err, c.want, c.text)
		})
	}
	if got := append(h.mounts(), h.devices()...); len(got) > 0 || !blank(t, v.file()) {
		t.Errorf("mounted or attached are %v, or the volume was written to", got)
	}
	must(t, v.unstage())
}

func TestAPublishThatFailsLeavesNothingBehind(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", capability(multiWriter, &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: []string{"nonsense=hunter2"}}), nil)
	must(t, v.stage())
	err := v.publish("t")
	wantCode(t, err, codes.Internal, "mount")
	if strings.Contains(err.Error()+h.log.String(), "hunter2") {
		t.Error("a mount flag was shown")
	}
	if got := append(h.mounts(), h.devices()...); len(got) > 0 {
		t.Errorf("mounted or attached are %v", got)
	}
	if _, err := os.Lstat(h.path("t")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target is left: %v", err)
	}
	must(t, v.unstage())
	// The filesystem that was made and never mounted is made again, for whoever comes.
	v.cap = mounted("ext4")
	must(t, v.stage(), v.publish("t"), v.unpublish("t"), v.unstage())
}

// TestAPublishThatFailsLateIsUndone lets a publish fail when everything but the bind is done.
func TestAPublishThatFailsLateIsUndone(t *testing.T) {
	for name, c := range map[string]struct {
		cap   *csi.VolumeCapability
		spoil func(target string) error
	}{
		"mount": {mounted("ext4"), func(target string) error { return os.WriteFile(target, nil, 0o600) }},
		"block": {block(), func(target string) error { return os.Mkdir(target, 0o700) }},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, "xfs")
			v := h.create("a", c.cap, nil)
			must(t, v.stage())
			h.stop()
			h.watch = func(ctx context.Context) context.Context {
				return crashpoint.With(ctx, func(place string) {
					if place == "target made" {
						must(t, os.Remove(h.path("t")), c.spoil(h.path("t")))
					}
				})
			}
			h.start()
			wantCode(t, v.publish("t"), codes.Internal, "bind")
			h.stop()
			w := h.world()
			if len(w.Mounts) > 0 || w.Devices > 0 || len(w.Targets) > 0 || len(w.Volumes) != 1 || strings.Contains(w.Volumes[0], "publish") {
				t.Errorf("left behind is %+v", w)
			}
			h.watch = nil
			h.start()
			must(t, v.publish("t"), v.unpublish("t"), v.unstage(), v.delete())
		})
	}
}

func TestNodeUnpublishVolumeRefusesBadRequests(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage(), v.publish("t"))
	for name, c := range map[string]struct {
		id, target string
		ext        *deferred.NodeUnpublishVolumeRequestExtension
		want       codes.Code
	}{
		"no id":                           {"", "/t", nil, codes.InvalidArgument},
		"no target":                       {v.id, "", nil, codes.InvalidArgument},
		"a relative target":               {v.id, "t", nil, codes.InvalidArgument},
		"no such volume":                  {"none", "/t", nil, codes.NotFound},
		"another pool's volume":           {handle.NewVolume("ffffffffffff").String(), "/t", nil, codes.NotFound},
		"another target":                  {v.id, h.path("other"), nil, codes.OK},
		"never mounted, and not deferred": {v.id, h.path("t"), &deferred.NodeUnpublishVolumeRequestExtension{NeverMounted: true}, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			req := &csi.NodeUnpublishVolumeRequest{VolumeId: c.id, TargetPath: c.target}
			if c.ext != nil {
				must(t, deferred.Set(req, c.ext))
			}
			_, err := h.node.NodeUnpublishVolume(h.call(), req)
			wantCode(t, err, c.want)
		})
	}
	must(t, os.WriteFile(h.path("t/file"), nil, 0o600)) // it is still mounted
	must(t, v.unpublish("t"))
}

func TestAMountInUseIsNotUnpublished(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage(), v.publish("t"))
	f, err := os.Create(h.path("t/file"))
	must(t, err)
	wantCode(t, v.unpublish("t"), codes.FailedPrecondition, h.path("t"))
	_, err = v.deferTo("s", false)
	wantCode(t, err, codes.FailedPrecondition)
	must(t, f.Close(), v.unpublish("t"))
	_, err = v.deferTo("s", false)
	must(t, err, v.undefer("s", false))
}

func TestOthersMountsAreLeftAlone(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage(), os.Mkdir(h.path("t"), 0o700))
	for _, path := range []string{h.path("t"), v.staging()} {
		scratch.Run(t, "mount", "-t", "tmpfs", "other", path)
		wantCode(t, v.publish("t"), codes.FailedPrecondition, path, "something else")
		must(t, v.unpublish("t"), v.unstage(), v.stage())
		scratch.Run(t, "umount", path)
	}
	must(t, v.publish("t"), v.unpublish("t"), v.unstage())
}

func TestTheGroupGetsAccess(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", capability(multiWriter, &csi.VolumeCapability_MountVolume{VolumeMountGroup: "4711"}), nil)
	must(t, v.stage(), v.publish("a"), os.WriteFile(h.path("a/file"), nil, 0o600))
	other := *v
	other.cap = capability(multiWriter, &csi.VolumeCapability_MountVolume{VolumeMountGroup: "4712"})
	must(t, other.publish("b"))
	for _, name := range []string{"a", "a/file"} {
		info, err := os.Stat(h.path(name))
		must(t, err)
		if st := info.Sys().(*syscall.Stat_t); st.Gid != 4712 || info.Mode().Perm()&0o060 != 0o060 {
			t.Errorf("%s has group %d and mode %v", name, st.Gid, info.Mode())
		}
	}
	must(t, os.Chmod(h.path("a/file"), 0o600), other.publish("b"))
	if info, err := os.Stat(h.path("a/file")); err != nil || info.Mode() != 0o600 {
		t.Errorf("a repeated publish went over the files of a running pod: %v, %v", info, err)
	}
	must(t, v.unpublish("a"), v.unpublish("b"))
	// Who only reads changes nothing.
	other.cap.GetMount().VolumeMountGroup = "4713"
	must(t, other.publishReadOnly("r"))
	if info, err := os.Stat(h.path("r")); err != nil || info.Sys().(*syscall.Stat_t).Gid != 4712 {
		t.Errorf("the group is %v, %v", info, err)
	}
	must(t, v.unpublish("r"))
}

func TestARebootEndsMounts(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", capability(writer, &csi.VolumeCapability_MountVolume{}), nil)
	must(t, v.stage(), v.publish("a"), os.WriteFile(h.path("a/file"), []byte("data"), 0o600))
	h.reboot()
	must(t, v.publish("a")) // without another stage
	if got := string(read(t, h.path("a/file"))); got != "data" {
		t.Errorf("after the reboot there is %q", got)
	}
	wantCode(t, v.publish("b"), codes.FailedPrecondition, h.path("a"))
	h.reboot()
	must(t, v.stage(), v.publish("b"))
	must(t, v.unpublish("a"), v.unpublish("b"), v.unstage(), v.delete())

	b := h.create("b", block(), nil)
	must(t, b.stage(), b.publish("a"))
	h.reboot()
	must(t, b.publish("a"), b.unpublish("a"), b.unstage(), b.delete())
}

func TestARestartFindsMountsAgain(t *testing.T) {
	h := newHost(t, "xfs")
	v, b := h.create("v", mounted("xfs"), nil), h.create("b", block(), nil)
	must(t, v.stage(), v.publish("v"), b.stage(), b.publish("b"))
	before := append(h.mounts(), h.devices()...)
	h.stop()
	h.start()
	must(t, v.publish("v"), b.publish("b"), v.publish("v2"), v.unpublish("v2"))
	if after := append(h.mounts(), h.devices()...); strings.Join(after, " ") != strings.Join(before, " ") {
		t.Errorf("there are %v, there were %v", after, before)
	}
	must(t, v.unpublish("v"), b.unpublish("b"), v.unstage(), b.unstage())
}

func TestSecretsAreNotLogged(t *testing.T) {
	h := newHost(t, "xfs")
	const secret = "hunter2"
	secrets := map[string]string{"key": secret}
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	for _, c := range []*csi.VolumeCapability{v.cap, nil, capability(multiWriter, &csi.VolumeCapability_MountVolume{MountFlags: []string{"pass=" + secret}})} {
		stage := &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging(), VolumeCapability: c, Secrets: secrets, PublishContext: secrets}
		_, err1 := h.node.NodeStageVolume(h.call(), stage)
		publish := v.publishRequest("t")
		publish.VolumeCapability, publish.Secrets, publish.PublishContext = c, secrets, secrets
		publish.VolumeContext = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": secret}
		_, err2 := h.node.NodePublishVolume(h.call(), publish)
		create := createRequest("a")
		create.Secrets, create.VolumeCapabilities = secrets, []*csi.VolumeCapability{c}
		_, err3 := h.control.CreateVolume(h.call(), create)
		for _, err := range []error{err1, err2, err3} {
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("an error shows it: %v", err)
			}
		}
		if c == v.cap {
			must(t, err2, v.unpublish("t"))
		}
	}
	must(t, v.unstage())
	for _, place := range []string{h.log.String(), string(read(t, filepath.Join(h.root(), "catalog.db")))} {
		if strings.Contains(place, secret) {
			t.Error("the secret was written down")
		}
	}
}
