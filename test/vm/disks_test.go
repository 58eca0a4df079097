package vm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/halt"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

// TestDisks is plugging in and out.
func TestDisks(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	t.Run("many at once, found by serial", func(t *testing.T) { many(t, m) })
	t.Run("what cannot be plugged in", func(t *testing.T) { impossible(t, m) })
	t.Run("the same again, and another one", func(t *testing.T) { again(t, m) })
	t.Run("one writer", func(t *testing.T) { oneWriter(t, m) })
	t.Run("no port is free", func(t *testing.T) { full(t, m) })
	t.Run("a file on a filesystem without direct I/O", func(t *testing.T) { noDirect(t, m) })
	t.Run("a block device", func(t *testing.T) { blockDevice(t, m) })
	t.Run("a guest that does not let go", func(t *testing.T) { unwilling(t, m) })
}

func many(t *testing.T, m *vm.Machine) {
	const n = 8
	var plugged sync.WaitGroup
	paths := make([]string, n)
	for i := range n {
		paths[i] = newImage(t, int64(i+1)*64*mib)
		plugged.Go(func() {
			if err := m.AttachDisk(vm.Context(t), qemu.Disk{Serial: fmt.Sprint("many-", i), Path: paths[i]}); err != nil {
				t.Error(err)
			}
		})
	}
	plugged.Wait()
	// All are there in whatever order; each is its own size, and its data gets to its own file.
	for i := range n {
		serial := fmt.Sprint("many-", i)
		req := request(serial, "ext4", neverWritten)
		req.MinDeviceBytes = int64(i+1) * 64 * mib
		if resp := m.Mount(t, req); resp.GetDeviceBytes() != req.GetMinDeviceBytes() {
			t.Errorf("%s has %d bytes", serial, resp.GetDeviceBytes())
		}
		m.Shell(t, "echo "+serial+" > "+mountPath(serial)+"/name; sync -f "+mountPath(serial))
	}
	for i := range n {
		serial := fmt.Sprint("many-", i)
		m.Unmount(t, mountPath(serial))
		m.Detach(t, serial)
		if holds(m.PID(), paths[i]) || holds(os.Getpid(), paths[i]) {
			t.Errorf("%s is still open", paths[i])
		}
		if out := mustHost(t, "debugfs", "-R", "cat /name", paths[i]); !strings.Contains(out, serial) {
			t.Errorf("the file of %s has %q", serial, out)
		}
	}
}

// holds says whether a process has a file open.
func holds(pid int, path string) bool {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && target == path {
			return true
		}
	}
	return false
}

func impossible(t *testing.T, m *vm.Machine) {
	dir := vm.Dir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	good := newImage(t, mib)
	grow(t, at("empty"), 0)
	grow(t, at("odd"), mib+512)
	if err := errors.Join(os.Symlink(good, at("link")), os.Symlink(filepath.Dir(good), at("dirlink")), unix.Mkfifo(at("fifo"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		disk qemu.Disk
		kind error
	}{
		{"no serial", qemu.Disk{Path: good}, errdefs.ErrInvalidArgument},
		{"a serial that is too long", qemu.Disk{Serial: strings.Repeat("x", 21), Path: good}, errdefs.ErrInvalidArgument},
		{"a serial with odd characters", qemu.Disk{Serial: "a,b", Path: good}, errdefs.ErrInvalidArgument},
		{"a relative path", qemu.Disk{Serial: "x", Path: "disk.img"}, errdefs.ErrInvalidArgument},
		{"a path that is not clean", qemu.Disk{Serial: "x", Path: dir + "/../" + filepath.Base(dir) + "/odd"}, errdefs.ErrInvalidArgument},
		{"a file that is not there", qemu.Disk{Serial: "x", Path: at("missing")}, errdefs.ErrNotFound},
		{"a symbolic link", qemu.Disk{Serial: "x", Path: at("link")}, errdefs.ErrInvalidArgument},
		{"a symbolic link on the way", qemu.Disk{Serial: "x", Path: at("dirlink/disk.img")}, errdefs.ErrInvalidArgument},
		{"a directory", qemu.Disk{Serial: "x", Path: dir}, errdefs.ErrInvalidArgument},
		{"a pipe", qemu.Disk{Serial: "x", Path: at("fifo")}, errdefs.ErrInvalidArgument},
		{"a character device", qemu.Disk{Serial: "x", Path: "/dev/null"}, errdefs.ErrInvalidArgument},
		{"an empty file", qemu.Disk{Serial: "x", Path: at("empty")}, errdefs.ErrInvalidArgument},
		{"an odd size", qemu.Disk{Serial: "x", Path: at("odd")}, errdefs.ErrInvalidArgument},
	} {
		if err := m.AttachDisk(vm.Context(t), tc.disk); !errors.Is(err, tc.kind) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	m.Detach(t, "x")
	if _, err := m.ResizeDisk(vm.Context(t), "x"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("resize of what is not attached: %v", err)
	}
}

func again(t *testing.T, m *vm.Machine) {
	path, other := newImage(t, mib), newImage(t, mib)
	attach(t, m, "again", path)
	if err := m.AttachDisk(vm.Context(t), qemu.Disk{Serial: "again", Path: path}); err != nil {
		t.Errorf("the same disk: %v", err)
	}
	for _, d := range []qemu.Disk{{Serial: "again", Path: other}, {Serial: "again", Path: path, ReadOnly: true}} {
		if err := m.AttachDisk(vm.Context(t), d); !errors.Is(err, errdefs.ErrAlreadyExists) {
			t.Errorf("another disk: %v", err)
		}
	}
}

func oneWriter(t *testing.T, m *vm.Machine) {
	path := newImage(t, mib)
	attach(t, m, "first", path)
	for _, d := range []qemu.Disk{{Serial: "second", Path: path}, {Serial: "second", Path: path, ReadOnly: true}} {
		if err := m.AttachDisk(vm.Context(t), d); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "in use elsewhere") {
			t.Errorf("a second user of a file: %v", err)
		}
	}
	shared := newImage(t, mib)
	for _, serial := range []string{"reader-1", "reader-2"} {
		m.Attach(t, qemu.Disk{Serial: serial, Path: shared, ReadOnly: true})
		defer m.Detach(t, serial)
	}
}

func full(t *testing.T, m *vm.Machine) {
	path := newImage(t, mib)
	for i := range qemu.MaxDisks {
		m.Attach(t, qemu.Disk{Serial: fmt.Sprint("full-", i), Path: path, ReadOnly: true})
	}
	err := m.AttachDisk(vm.Context(t), qemu.Disk{Serial: "more", Path: path, ReadOnly: true})
	if !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("one more: %v", err)
	}
	for i := range qemu.MaxDisks {
		m.Detach(t, fmt.Sprint("full-", i))
	}
}

func noDirect(t *testing.T, m *vm.Machine) {
	priv.Root(t)
	dir := vm.Dir(t)
	if err := unix.Mount("none", dir, "ramfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	path := filepath.Join(dir, "disk.img")
	grow(t, path, mib)
	err := m.AttachDisk(vm.Context(t), qemu.Disk{Serial: "ram", Path: path})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "O_DIRECT") {
		t.Errorf("error %v", err)
	}
}

// loopDevice makes a block device of a file.
func loopDevice(t *testing.T, path string) string {
	t.Helper()
	dev := strings.TrimSpace(mustHost(t, "losetup", "--find", "--show", path))
	t.Cleanup(func() { mustHost(t, "losetup", "--detach", dev) })
	return dev
}

func blockDevice(t *testing.T, m *vm.Machine) {
	priv.Root(t)
	path := newImage(t, usual)
	dev := loopDevice(t, path)
	attach(t, m, "block", dev)
	m.Mount(t, request("block", "xfs", neverWritten))
	m.Shell(t, "echo x > "+mountPath("block")+"/file; sync")
	grow(t, path, 2*usual)
	mustHost(t, "losetup", "--set-capacity", dev)
	size, err := m.ResizeDisk(vm.Context(t), "block")
	if err != nil || size != 2*usual {
		t.Fatalf("resize: %d, %v", size, err)
	}
	resp, err := m.Agent().GrowVolume(vm.Context(t), &guestv1.GrowVolumeRequest{MountPath: mountPath("block"), MinDeviceBytes: size})
	if err != nil || !resp.GetGrown() {
		t.Errorf("grow: %v, %v", resp, rpc.FromWire(err))
	}
}

// unwilling stops QEMU, so that nothing in it answers.
func unwilling(t *testing.T, m *vm.Machine) {
	path := newImage(t, mib)
	attach(t, m, "stuck", path)
	goOn := halt.Process(t, m.PID())
	defer goOn()
	ctx, cancel := timeout(t, time.Second)
	defer cancel()
	if err := m.DetachDisk(ctx, "stuck"); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("detach: %v", err)
	}
	if err := m.AttachDisk(ctx, qemu.Disk{Serial: "stuck-2", Path: path, ReadOnly: true}); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("attach: %v", err)
	}
	if _, err := m.ResizeDisk(ctx, "stuck"); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("resize: %v", err)
	}
	if !holds(m.PID(), path) {
		t.Error("it was to count as attached, and is not open")
	}
	goOn()
	m.Detach(t, "stuck")
	m.Detach(t, "stuck-2")
	if holds(m.PID(), path) {
		t.Error("it was detached, and is still open")
	}
}

// TestHungGuest is about a VM that does nothing any more: whoever asks it something gets an error, and it can be stopped.
func TestHungGuest(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	path := newImage(t, mib)
	m.Attach(t, qemu.Disk{Serial: "hung", Path: path})
	halt.Process(t, m.PID())
	ctx, cancel := timeout(t, time.Second)
	defer cancel()
	if _, err := m.Agent().GetInfo(ctx, &guestv1.GetInfoRequest{}); err == nil {
		t.Error("a guest that is stopped has answered")
	}
	if err := m.Stop(ctx); err == nil {
		t.Error("a guest that is stopped has shut down")
	}
	select {
	case <-m.Done():
	default:
		t.Error("Stop has returned, and the VM has not ended")
	}
	if holds(os.Getpid(), path) {
		t.Error("the disk is still open")
	}
	if err := m.DetachDisk(vm.Context(t), "hung"); err != nil {
		t.Errorf("detach from a VM that has ended: %v", err)
	}
	if err := m.AttachDisk(vm.Context(t), qemu.Disk{Serial: "late", Path: path}); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("attach to a VM that has ended: %v", err)
	}
	if _, err := m.Agent().GetInfo(vm.Context(t), &guestv1.GetInfoRequest{}); !errors.Is(rpc.FromWire(err), errdefs.ErrUnavailable) {
		t.Errorf("the agent of a VM that has ended: %v", err)
	}
}

// TestPanic is about a kernel that panics.
func TestPanic(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	c := m.Begin(t, "sh", "-c", "echo begin; sleep 0.1; echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger")
	for {
		if _, err := c.Read(); err != nil {
			if !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("the agent of a guest that has panicked: %v", err)
			}
			break
		}
	}
	ctx, cancel := timeout(t, vm.Timeout)
	defer cancel()
	if err := m.Wait(ctx); err != nil {
		t.Errorf("wait: %v", err)
	}
	if text := m.Console(); !strings.Contains(text, "sysrq triggered crash") {
		t.Errorf("the console ends with %q", text)
	}
}

// TestOwnerDies kills the process that has started a VM, and sees that the VM dies, too.
func TestOwnerDies(t *testing.T) {
	vm.Need(t)
	if os.Getenv("CRUST_TEST_OWNER") != "" {
		m := vm.Start(t)
		fmt.Printf("pid %d\n", m.PID())
		select {}
	}
	t.Parallel()
	owner, out := restart(t, "TestOwnerDies", "CRUST_TEST_OWNER=1")
	pid := 0
	for line := range lines(out) {
		if text, ok := strings.CutPrefix(line, "pid "); ok {
			pid, _ = strconv.Atoi(text)
			break
		}
	}
	if pid == 0 {
		t.Fatal("the owner has not started a VM")
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	deadline := time.Now().Add(vm.Timeout)
	for unix.Kill(pid, 0) == nil {
		if stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); strings.Contains(string(stat), ") Z ") {
			break // dead; whoever adopted it has not collected it
		}
		if time.Now().After(deadline) {
			t.Fatalf("QEMU (pid %d) has outlived its owner", pid)
		}
		time.Sleep(10 * time.Millisecond) // no event tells of the death of somebody else's child
	}
}
