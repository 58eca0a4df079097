package csiplugin_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/testing/protocmp"

	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/csi/deferred"
)

// sandbox is another process that has a volume open, as a VMM has.
func sandbox(t *testing.T, file string) (end func()) {
	t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	must(t, err)
	vmm := exec.Command("sleep", "600")
	vmm.Stdin = f
	must(t, vmm.Start(), f.Close())
	end = func() { _ = vmm.Process.Kill(); _ = vmm.Wait() }
	t.Cleanup(end)
	return end
}

func TestADeferredPublishSaysWhatToMountAndMountsNothing(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs", "ext4"} {
		t.Run("a pool on "+fstype, func(t *testing.T) {
			h := newHost(t, fstype)
			v := h.create("a", capability(multiWriter, &csi.VolumeCapability_MountVolume{FsType: "xfs", MountFlags: []string{"noatime"}}), nil)
			mount := v.cap.GetMount()
			must(t, deferred.Set(mount, &deferred.MountVolumeExtension{VolumeSupplementalGroup: "5", VolumeSupplementalGroupChangePolicy: "OnRootMismatch"}))
			must(t, v.stage())
			want := &deferred.DeferredFilesystem{
				Device: v.file(), FsType: "xfs", MountFlags: []string{"noatime"}, SizeBytes: 300 * mib,
				FormatPolicy: deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK, NeverWritten: true,
				SupplementalGroup: "5", SupplementalGroupChangePolicy: "OnRootMismatch",
			}
			for range 2 {
				got, err := v.deferTo("t", false)
				must(t, err)
				if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
					t.Error(diff)
				}
			}
			if _, err := os.Lstat(h.path("t")); !os.IsNotExist(err) {
				t.Errorf("the target was touched: %v", err)
			}
			if got := append(h.mounts(), h.devices()...); len(got) > 0 {
				t.Errorf("mounted or attached are %v", got)
			}
			must(t, v.undefer("t", false), v.undefer("t", false), v.unstage(), v.delete())
		})
	}
}

func TestTheGroupOfKubernetesIsPassedOnToo(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", capability(writer, &csi.VolumeCapability_MountVolume{VolumeMountGroup: "1000"}), nil)
	must(t, v.stage())
	got, err := v.deferTo("t", false)
	must(t, err)
	if got.GetSupplementalGroup() != "1000" || got.GetSupplementalGroupChangePolicy() != "" || got.GetFsType() != "ext4" {
		t.Errorf("got %v", got)
	}
	must(t, v.undefer("t", false))
}

func TestAReadOnlyDeferralIsNeverFormatted(t *testing.T) {
	h := newHost(t, "xfs")
	for name, c := range map[string]*csi.VolumeCapability{
		"by access mode": capability(reader, &csi.VolumeCapability_MountVolume{}),
		"by mount flag":  capability(multiWriter, &csi.VolumeCapability_MountVolume{MountFlags: []string{"noatime,ro"}}),
		"by readonly":    mounted("ext4"),
	} {
		t.Run(name, func(t *testing.T) {
			v := h.create(name, c, nil)
			must(t, v.stage())
			got, err := v.deferTo("t", name == "by readonly")
			must(t, err)
			if !got.GetReadOnly() || got.GetFormatPolicy() != deferred.FormatPolicy_FORMAT_POLICY_NEVER {
				t.Errorf("got %v", got)
			}
			must(t, v.undefer("t", true), v.unstage())
		})
	}
}

func TestOneWriter(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	deferRW := func(target string) error { _, err := v.deferTo(target, false); return err }
	deferRO := func(target string) error { _, err := v.deferTo(target, true); return err }

	must(t, deferRW("a"))
	wantCode(t, deferRW("b"), codes.FailedPrecondition, h.path("a"))
	wantCode(t, deferRO("b"), codes.FailedPrecondition, h.path("a"))
	wantCode(t, v.publish("b"), codes.FailedPrecondition, h.path("a"), "sandbox")
	wantCode(t, deferRO("a"), codes.AlreadyExists, h.path("a"))
	wantCode(t, v.publish("a"), codes.AlreadyExists)
	must(t, v.undefer("a", true))

	must(t, v.publish("a"))
	wantCode(t, deferRW("b"), codes.FailedPrecondition, h.path("a"), "host")
	wantCode(t, deferRO("b"), codes.FailedPrecondition, h.path("a"))
	wantCode(t, deferRW("a"), codes.AlreadyExists)
	wantCode(t, v.undefer("a", false), codes.FailedPrecondition, "without defer_fs_ops")
	must(t, v.unpublish("a"))

	// The last unpublish on the host makes way for a sandbox, without an unstage. Several can read.
	must(t, deferRO("a"), deferRO("b"))
	wantCode(t, deferRW("c"), codes.FailedPrecondition)
	wantCode(t, v.publishReadOnly("c"), codes.FailedPrecondition)
	must(t, v.undefer("a", false), v.undefer("b", false), v.unstage(), v.delete())
}

func TestStrangersKeepAVolumeFromBeingPublished(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	dev := strings.TrimSpace(scratch.Run(t, "losetup", "--find", "--show", v.file()))
	_, err := v.deferTo("t", false)
	wantCode(t, err, codes.FailedPrecondition, dev)
	wantCode(t, v.publish("t"), codes.FailedPrecondition, dev)
	if got := h.devices(); len(got) != 1 {
		t.Errorf("the stranger's device is gone: %v", got)
	}
	scratch.Run(t, "losetup", "--detach", dev)

	end := sandbox(t, v.file())
	_, err = v.deferTo("t", false)
	wantCode(t, err, codes.FailedPrecondition, "sleep")
	wantCode(t, v.publish("t"), codes.FailedPrecondition, "sleep")
	end()
	_, err = v.deferTo("t", false)
	must(t, err)

	// A repeated publish finds its sandbox running, and an unpublish waits for its end.
	end = sandbox(t, v.file())
	_, err = v.deferTo("t", false)
	wantCode(t, err, codes.OK)
	wantCode(t, v.undefer("t", false), codes.FailedPrecondition, "sleep")
	end()
	must(t, v.undefer("t", false))
}

// TestWhatASandboxLeavesIsErasedOnlyIfNobodyEverMountedIt goes through what the CO can say, and what there was before.
func TestWhatASandboxLeavesIsErasedOnlyIfNobodyEverMountedIt(t *testing.T) {
	h := newHost(t, "xfs")
	for name, c := range map[string]struct {
		before, neverMounted, erased bool
	}{
		"an interrupted format":                 {false, true, true},
		"a filesystem that was used":            {false, false, false},
		"data from before, and never mounted":   {true, true, false},
		"data from before, and used":            {true, false, false},
		"nothing was written, and nobody knows": {false, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			v := h.create(name, mounted("ext4"), nil)
			must(t, v.stage())
			if c.before {
				write(t, v.file(), []byte("precious"), 8*mib)
			}
			fs, err := v.deferTo("t", false)
			must(t, err)
			if fs.GetNeverWritten() == c.before {
				t.Errorf("got %v", fs)
			}
			write(t, v.file(), []byte("fragment"), mib)
			if again, err := v.deferTo("t", false); err != nil || again.GetNeverWritten() {
				t.Errorf("asked again: %v, %v", again, err)
			}
			must(t, v.undefer("t", c.neverMounted), v.undefer("t", c.neverMounted))
			if got := blank(t, v.file()); got != c.erased {
				t.Errorf("the volume is blank: %t, want %t", got, c.erased)
			}
			again, err := v.deferTo("t2", false)
			must(t, err)
			if again.GetNeverWritten() != c.erased || again.GetSizeBytes() != 16*mib {
				t.Errorf("published again: %v", again)
			}
			must(t, v.undefer("t2", false))
		})
	}
}

func TestNothingIsErasedUnderASandbox(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	_, err := v.deferTo("t", false)
	must(t, err)
	write(t, v.file(), []byte("fragment"), 0)
	end := sandbox(t, v.file())
	wantCode(t, v.undefer("t", true), codes.FailedPrecondition, "sleep")
	if blank(t, v.file()) {
		t.Fatal("it was erased while a sandbox had it open")
	}
	end()
	must(t, v.undefer("t", true))
	if !blank(t, v.file()) {
		t.Error("it was not erased")
	}
}

// TestARebootEndsDeferrals publishes again after a reboot: at the same target, and at another one.
func TestARebootEndsDeferrals(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	_, err := v.deferTo("t", false)
	must(t, err)
	write(t, v.file(), []byte("data"), 0)
	h.reboot()
	fs, err := v.deferTo("t", false)
	must(t, err)
	if fs.GetNeverWritten() {
		t.Error("the data was not seen")
	}
	_, err = v.deferTo("other", false)
	wantCode(t, err, codes.FailedPrecondition, h.path("t")) // it is in effect again
	// What was there before this boot may be data, whatever the CO says.
	must(t, v.undefer("t", true))
	if blank(t, v.file()) {
		t.Error("data from before the reboot was erased")
	}

	_, err = v.deferTo("t", false)
	must(t, err)
	h.reboot()
	_, err = v.deferTo("other", false)
	must(t, err)
	must(t, v.undefer("t", true)) // there is nothing any more
	if blank(t, v.file()) {
		t.Error("another publish's data was erased")
	}
	wantCode(t, v.unstage(), codes.FailedPrecondition, h.path("other"))
	must(t, v.undefer("other", false), v.unstage(), v.delete())
}

// TestAnEndedDeferralDoesNotEraseItsSuccessorsData lets a blank volume's publish end with a reboot, and another one write.
func TestAnEndedDeferralDoesNotEraseItsSuccessorsData(t *testing.T) {
	for name, successor := range map[string]func(v *volume) error{
		"a sandbox": func(v *volume) error {
			_, err := v.deferTo("b", false)
			write(t, v.file(), []byte("data"), 0)
			return err
		},
		"the host": func(v *volume) error { return errors.Join(v.publish("b"), v.unpublish("b")) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, "xfs")
			v := h.create("a", mounted("ext4"), nil)
			must(t, v.stage())
			_, err := v.deferTo("a", false)
			must(t, err)
			h.reboot()
			must(t, successor(v), v.undefer("a", true))
			if blank(t, v.file()) {
				t.Error("the data is gone")
			}
			must(t, v.undefer("b", false), v.unstage(), v.delete())
		})
	}
}

func TestTheParameterDeferIsKept(t *testing.T) {
	h := newHost(t, "xfs")
	for value, c := range map[string]struct{ host, sandbox codes.Code }{
		"always": {codes.FailedPrecondition, codes.OK},
		"never":  {codes.OK, codes.FailedPrecondition},
		"auto":   {codes.OK, codes.OK},
	} {
		t.Run(value, func(t *testing.T) {
			v := h.create(value, mounted("ext4"), map[string]string{deferred.ParameterDefer: value})
			must(t, v.stage())
			err := v.publish("h")
			wantCode(t, err, c.host)
			must(t, v.unpublish("h"))
			_, err = v.deferTo("s", false)
			wantCode(t, err, c.sandbox)
			must(t, v.undefer("s", true), v.unstage())
		})
	}
}

func TestDeferralStatsAndExpansion(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	_, err := v.deferTo("t", false)
	must(t, err)
	write(t, v.file(), make([]byte, mib), 0)
	defer sandbox(t, v.file())()

	stats := &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: h.path("t")}
	_, err = h.node.NodeGetVolumeStats(h.call(), stats)
	wantCode(t, err, codes.FailedPrecondition, "sandbox")
	must(t, deferred.Set(stats, &deferred.NodeGetVolumeStatsRequestExtension{DeferFsOps: true}))
	got, err := h.node.NodeGetVolumeStats(h.call(), stats)
	must(t, err)
	if u := got.GetUsage(); len(u) != 1 || u[0].GetTotal() != 16*mib || u[0].GetUsed() < mib || u[0].GetUsed()+u[0].GetAvailable() != 16*mib {
		t.Errorf("got %v", got)
	}

	expand := &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: h.path("t"), CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib}}
	_, err = h.node.NodeExpandVolume(h.call(), expand)
	wantCode(t, err, codes.FailedPrecondition, "sandbox")
	must(t, deferred.Set(expand, &deferred.NodeExpandVolumeRequestExtension{DeferFsOps: true}))
	_, err = h.node.NodeExpandVolume(h.call(), expand)
	wantCode(t, err, codes.OutOfRange, "ControllerExpandVolume")
	_, err = h.control.ControllerExpandVolume(h.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: expand.GetCapacityRange()})
	must(t, err)
	for range 2 {
		resp, err := h.node.NodeExpandVolume(h.call(), expand)
		if err != nil || resp.GetCapacityBytes() != 32*mib {
			t.Errorf("got %v, %v", resp, err)
		}
	}
	if info, err := os.Stat(v.file()); err != nil || info.Size() != 32*mib {
		t.Errorf("the file is %v, %v", info, err)
	}
}
