package vm_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// TestMountedVolumes is what the agent does with volumes, in one guest.
func TestMountedVolumes(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t, func(c *qemu.Config) { c.CPUs = 2 })
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			t.Run("mount options", func(t *testing.T) { mountOptions(t, m, fs) })
			t.Run("statistics and health", func(t *testing.T) { statistics(t, m, fs) })
			t.Run("growth while a writer runs", func(t *testing.T) { growth(t, m, fs) })
			t.Run("growth at the mount", func(t *testing.T) { growthAtMount(t, m, fs) })
			t.Run("a freeze holds a writer back and ends by itself", func(t *testing.T) { freeze(t, m, fs) })
			t.Run("a trim punches holes", func(t *testing.T) { trim(t, m, fs) })
			t.Run("a volume in use is not unmounted", func(t *testing.T) { busy(t, m, fs) })
			t.Run("a filesystem that has stopped after an error", func(t *testing.T) { shutDown(t, m, fs) })
		})
	}
	t.Run("two clones in one guest", func(t *testing.T) { clones(t, m) })
	t.Run("damage", func(t *testing.T) { damage(t, m) })
	t.Run("a disk at two paths", func(t *testing.T) { twice(t, m) })
}

func mountOptions(t *testing.T, m *vm.Machine, fs string) {
	path := newImage(t, usual)
	attach(t, m, "options", path)
	req := request("options", fs, neverWritten)
	req.MountFlags = []string{"noatime,nosuid", "nodev", "no_such_option=1"}
	_, err := m.TryMount(t, req)
	if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "no_such_option") || !strings.Contains(err.Error(), "nknown parameter") {
		t.Errorf("an unknown option: %v", err)
	}
	if out := m.Run(t, "findmnt", "-n", "-o", "TARGET", "-l"); strings.Contains(out, mountPath("options")) {
		t.Errorf("something is mounted: %s", out)
	}
	// The filesystem was made by then; it is found, whatever the storage still says.
	req.MountFlags = req.MountFlags[:2]
	m.Mount(t, req)
	got := "," + m.Run(t, "findmnt", "-n", "-o", "OPTIONS", mountPath("options")) + ","
	want := map[string][]string{"ext4": {"errors=remount-ro"}, "xfs": {"nouuid"}}[fs]
	for _, option := range append(want, "rw", "noatime", "nosuid", "nodev") {
		if !strings.Contains(got, ","+option+",") {
			t.Errorf("options are %s, without %s", got, option)
		}
	}
}

func statistics(t *testing.T, m *vm.Machine, fs string) {
	fresh(t, m, "stats", fs, usual)
	before := m.Stats(t, mountPath("stats"))
	if before.GetAbnormal() || before.GetDeviceBytes() != usual || before.GetTotalBytes() < usual/2 || before.GetTotalBytes() > usual {
		t.Errorf("a new filesystem: %v", before)
	}
	m.Run(t, "dd", "if=/dev/urandom", "of="+mountPath("stats")+"/file", "bs=1M", "count=32", "conv=fsync", "status=none")
	after := m.Stats(t, mountPath("stats"))
	if used := after.GetUsedBytes() - before.GetUsedBytes(); used < 32*mib || used > 36*mib {
		t.Errorf("a file of 32 MiB takes %d bytes", used)
	}
	if after.GetUsedInodes() != before.GetUsedInodes()+1 {
		t.Errorf("inodes used: %d, then %d", before.GetUsedInodes(), after.GetUsedInodes())
	}
	df := strings.Fields(m.Run(t, "df", "-B1", "--output=size,avail,used,itotal,iavail,iused", mountPath("stats")))
	got := fmt.Sprint(after.GetTotalBytes(), after.GetAvailableBytes(), after.GetUsedBytes(), after.GetTotalInodes(), after.GetAvailableInodes(), after.GetUsedInodes())
	if want := strings.Join(df[len(df)-6:], " "); got != want {
		t.Errorf("statistics %s, and df has %s", got, want)
	}
	_, err := m.Agent().GetVolumeStats(vm.Context(t), &guestv1.GetVolumeStatsRequest{MountPath: "/run/elsewhere"})
	if !errors.Is(rpc.FromWire(err), errdefs.ErrNotFound) {
		t.Errorf("statistics of what is not mounted: %v", err)
	}
}

func growth(t *testing.T, m *vm.Machine, fs string) {
	path := fresh(t, m, "grow", fs, usual)
	file := mountPath("grow") + "/records"
	writer := m.Begin(t, vm.ToolPath, "write", file)
	writer.ReadUntil("3\n")
	before := m.Stats(t, mountPath("grow")).GetTotalBytes()
	for _, size := range []int64{usual + 64*mib, 3 * usual} {
		grow(t, path, size)
		seen, err := m.ResizeDisk(vm.Context(t), "grow")
		if err != nil || seen != size {
			t.Fatalf("resize: %d, %v", seen, err)
		}
		resp, err := m.Agent().GrowVolume(vm.Context(t), &guestv1.GrowVolumeRequest{MountPath: mountPath("grow"), MinDeviceBytes: size})
		if err != nil || resp.GetDeviceBytes() != size || !resp.GetGrown() {
			t.Fatalf("grow: %v, %v", resp, rpc.FromWire(err))
		}
		after := m.Stats(t, mountPath("grow")).GetTotalBytes()
		if after <= before || after < size*8/10 {
			t.Errorf("a device of %d bytes has a filesystem of %d, after %d", size, after, before)
		}
		before = after
	}
	again, err := m.Agent().GrowVolume(vm.Context(t), &guestv1.GrowVolumeRequest{MountPath: mountPath("grow"), MinDeviceBytes: 3 * usual})
	if err != nil || again.GetGrown() {
		t.Errorf("grown again: %v, %v", again, rpc.FromWire(err))
	}
	said := strings.Fields(writer.ReadUntil("\n"))
	acknowledged, _ := strconv.Atoi(said[len(said)-1])
	if _, err := m.Agent().CloseExec(vm.Context(t), &guestv1.CloseExecRequest{ExecId: writer.ID}); err != nil {
		t.Fatal(rpc.FromWire(err))
	}
	if last, _ := strconv.Atoi(m.Run(t, vm.ToolPath, "verify", file)); last < acknowledged {
		t.Errorf("%d records were acknowledged, %d are there", acknowledged, last)
	}
	// A file that was made smaller behind our back: nothing may follow it.
	grow(t, path, usual)
	if _, err := m.ResizeDisk(vm.Context(t), "grow"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("a smaller file: %v", err)
	}
	grow(t, path, 3*usual)
	ctx, cancel := timeout(t, 2*time.Second)
	defer cancel()
	_, err = m.Agent().GrowVolume(ctx, &guestv1.GrowVolumeRequest{MountPath: mountPath("grow"), MinDeviceBytes: 9 * usual})
	if err := rpc.FromWire(err); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), strconv.Itoa(9*usual)) {
		t.Errorf("a device that does not get larger: %v", err)
	}
}

func growthAtMount(t *testing.T, m *vm.Machine, fs string) {
	path := fresh(t, m, "later", fs, usual)
	m.Unmount(t, mountPath("later"))
	m.Detach(t, "later")
	grow(t, path, 2*usual)
	m.Attach(t, qemu.Disk{Serial: "later", Path: path})
	req := request("later", fs, never)
	req.MinDeviceBytes = 2 * usual
	if resp := m.Mount(t, req); !resp.GetGrown() || resp.GetFormatted() || resp.GetDeviceBytes() != 2*usual {
		t.Errorf("mount: %v", resp)
	}
	if total := m.Stats(t, mountPath("later")).GetTotalBytes(); total < 2*usual*8/10 {
		t.Errorf("the filesystem has %d bytes", total)
	}
}

func freeze(t *testing.T, m *vm.Machine, fs string) {
	fresh(t, m, "freeze", fs, usual)
	do := func(limit time.Duration) error { return freezeFor(t, m, "freeze", limit) }
	thaw := func() error {
		_, err := m.Agent().ThawVolume(vm.Context(t), &guestv1.ThawVolumeRequest{MountPath: mountPath("freeze")})
		return rpc.FromWire(err)
	}
	if err := thaw(); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("a thaw without a freeze: %v", err)
	}
	if err := do(time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := do(time.Second); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("a second freeze: %v", err)
	}
	_, err := m.Agent().GrowVolume(vm.Context(t), &guestv1.GrowVolumeRequest{MountPath: mountPath("freeze")})
	if err := rpc.FromWire(err); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("growth of a frozen filesystem: %v", err)
	}
	writer := m.Begin(t, "sh", "-c", "echo begin; echo x > "+mountPath("freeze")+"/file; echo end")
	writer.ReadUntil("begin")
	blocked, err := m.Agent().ReadExec(vm.Context(t), &guestv1.ReadExecRequest{ExecId: writer.ID, Wait: durationpb.New(300 * time.Millisecond)})
	if err != nil || len(blocked.GetStdout()) > 0 || blocked.GetExited() {
		t.Errorf("a write to a frozen filesystem: %v, %v", blocked, err)
	}
	if m.Stats(t, mountPath("freeze")).GetAbnormal() {
		t.Error("a frozen filesystem is not abnormal")
	}
	if err := thaw(); err != nil {
		t.Fatal(err)
	}
	writer.ReadUntil("end")
	if err := do(500 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	// The write ends when the guest thaws by itself: nobody else does.
	m.Shell(t, "echo y > "+mountPath("freeze")+"/file2")
	if err := thaw(); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("a thaw when the time was up: %v", err)
	}
	if err := do(time.Minute); err != nil {
		t.Fatal(err)
	}
	m.Unmount(t, mountPath("freeze")) // thaws
}

func trim(t *testing.T, m *vm.Machine, fs string) {
	path := fresh(t, m, "trim", fs, usual)
	file := mountPath("trim") + "/file"
	m.Run(t, "dd", "if=/dev/urandom", "of="+file, "bs=1M", "count=64", "conv=fsync", "status=none")
	full := blocks(t, path)
	if full*512 < 64*mib {
		t.Fatalf("the file on the host has %d bytes", full*512)
	}
	m.Shell(t, "rm "+file+"; sync -f "+mountPath("trim"))
	resp, err := m.Agent().TrimVolume(vm.Context(t), &guestv1.TrimVolumeRequest{MountPath: mountPath("trim")})
	if err != nil || resp.GetTrimmedBytes() < 64*mib {
		t.Fatalf("trim: %v, %v", resp, rpc.FromWire(err))
	}
	if left := blocks(t, path); (full-left)*512 < 60*mib {
		t.Errorf("the host had %d bytes, and has %d", full*512, left*512)
	}
}

func busy(t *testing.T, m *vm.Machine, fs string) {
	fresh(t, m, "busy", fs, usual)
	file := mountPath("busy") + "/file"
	m.Shell(t, "echo x > "+file)
	holder := m.Begin(t, vm.ToolPath, "hold", file)
	holder.ReadUntil("held")
	_, err := m.Agent().UnmountVolume(vm.Context(t), &guestv1.UnmountVolumeRequest{MountPath: mountPath("busy")})
	if err := rpc.FromWire(err); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "tool (pid ") {
		t.Errorf("unmount of a volume in use: %v", err)
	}
	if got := m.Run(t, "cat", file); got != "x" {
		t.Errorf("it is not as it was: %q", got)
	}
	if _, err := m.Agent().SignalExec(vm.Context(t), &guestv1.SignalExecRequest{ExecId: holder.ID, Signal: 9}); err != nil {
		t.Fatal(rpc.FromWire(err))
	}
	if _, _, code := holder.Wait(); code != 128+9 {
		t.Errorf("killed with signal 9, exit code %d", code)
	}
	m.Unmount(t, mountPath("busy"))
	m.Unmount(t, mountPath("busy"))

	// Another mount namespace keeps the filesystem when ours has let go.
	m.Mount(t, request("busy", fs, never))
	other := m.Begin(t, "unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; sleep 1000")
	other.ReadUntil("ready")
	_, err = m.Agent().UnmountVolume(vm.Context(t), &guestv1.UnmountVolumeRequest{MountPath: mountPath("busy")})
	if err := rpc.FromWire(err); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "(pid ") {
		t.Errorf("unmount of a volume that another namespace has: %v", err)
	}
	if _, err := m.Agent().CloseExec(vm.Context(t), &guestv1.CloseExecRequest{ExecId: other.ID}); err != nil {
		t.Fatal(rpc.FromWire(err))
	}
	m.Unmount(t, mountPath("busy"))
}

func shutDown(t *testing.T, m *vm.Machine, fs string) {
	fresh(t, m, "down", fs, usual)
	says := "shut down"
	if fs == "ext4" {
		device := strings.TrimPrefix(m.Run(t, "findmnt", "-n", "-o", "SOURCE", mountPath("down")), "/dev/")
		m.Shell(t, "echo test > /sys/fs/ext4/"+device+"/trigger_fs_error")
		says = "counted 1 error"
	} else {
		m.Run(t, vm.ToolPath, "shutdown", mountPath("down"))
	}
	s := m.Stats(t, mountPath("down"))
	if !s.GetAbnormal() || !strings.Contains(s.GetMessage(), says) || !strings.Contains(s.GetMessage(), "unmounted and checked") {
		t.Errorf("statistics %v", s)
	}
	m.Unmount(t, mountPath("down"))
	if resp := m.Mount(t, request("down", fs, never)); resp.GetFormatted() || resp.GetChecked() != (fs == "ext4") {
		t.Errorf("mounted again: %v", resp)
	}
	if s := m.Stats(t, mountPath("down")); s.GetAbnormal() {
		t.Errorf("after the repair: %s", s.GetMessage())
	}
}

func clones(t *testing.T, m *vm.Machine) {
	original := fresh(t, m, "original", "xfs", usual)
	m.Shell(t, "echo same > "+mountPath("original")+"/file")
	m.Unmount(t, mountPath("original"))
	m.Detach(t, "original")
	clone := newImage(t, usual)
	mustHost(t, "cp", "--sparse=always", original, clone)
	attach(t, m, "original", original)
	attach(t, m, "clone", clone)
	for _, serial := range []string{"original", "clone"} {
		m.Mount(t, request(serial, "xfs", never))
		if got := m.Run(t, "cat", mountPath(serial)+"/file"); got != "same" {
			t.Errorf("%s has %q", serial, got)
		}
	}
}

func damage(t *testing.T, m *vm.Machine) {
	for fs, at := range map[string]int64{"ext4": 0, "xfs": 0} {
		t.Run(fs, func(t *testing.T) {
			path := fresh(t, m, "damaged", fs, usual)
			m.Shell(t, "mkdir "+mountPath("damaged")+"/d; cd "+mountPath("damaged")+"/d; seq 1000 | xargs touch")
			m.Unmount(t, mountPath("damaged"))
			m.Detach(t, "damaged")
			ruin(t, path, fs, at)
			before := digest(t, path)
			m.Attach(t, qemu.Disk{Serial: "damaged", Path: path})
			for _, policy := range []guestv1.FormatPolicy{never, neverWritten} {
				_, err := m.TryMount(t, request("damaged", fs, policy))
				if !errors.Is(err, errdefs.ErrDataLoss) || !strings.Contains(err.Error(), "backup") {
					t.Errorf("mount: %v", err)
				}
			}
			m.Detach(t, "damaged")
			if fs == "xfs" && digest(t, path) != before {
				t.Error("the diagnosis has changed the device")
			}
			m.Attach(t, qemu.Disk{Serial: "damaged", Path: path})
		})
	}
}

// ruin breaks a filesystem so that no tool repairs it without being asked, but its superblock is whole.
func ruin(t *testing.T, path, fs string, _ int64) {
	noise := make([]byte, 64<<10)
	for i := range noise {
		noise[i] = byte(i*7 + 1)
	}
	if fs == "ext4" {
		put(t, path, 4096, noise[:4096]) // group descriptors
		put(t, path, 128*mib+4096, noise[:4096])
		return
	}
	put(t, path, 512, noise[:1536]) // the headers of free space and inodes of the first allocation group
}

func twice(t *testing.T, m *vm.Machine) {
	fresh(t, m, "once", "ext4", usual)
	req := request("once", "ext4", never)
	req.MountPath = "/run/volumes/again"
	if _, err := m.TryMount(t, req); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), mountPath("once")) {
		t.Errorf("a second mount of a device: %v", err)
	}
	ctx, cancel := timeout(t, 2*time.Second)
	defer cancel()
	_, err := m.Agent().MountVolume(ctx, request("missing", "ext4", never))
	if err := rpc.FromWire(err); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), `"missing"`) {
		t.Errorf("a device that is not there: %v", err)
	}
	req = request("x", "ext4", never)
	req.MountPath = "/proc"
	if _, err := m.Agent().UnmountVolume(vm.Context(t), &guestv1.UnmountVolumeRequest{MountPath: "/proc"}); !errors.Is(rpc.FromWire(err), errdefs.ErrFailedPrecondition) {
		t.Errorf("unmount of what is no volume: %v", err)
	}
}
