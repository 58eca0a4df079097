package vm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
)

// Timeout is more than any single step takes, on a slow machine, with translated instructions, beside other tests.
const Timeout = 3 * time.Minute

// Machine is a VM of a test. Its methods that take a testing.TB fail the test.
type Machine struct {
	*qemu.VM
	t   testing.TB
	dir string
}

// Start boots a machine. change may change its configuration.
func Start(t testing.TB, change ...func(*qemu.Config)) *Machine {
	t.Helper()
	dir := Dir(t)
	config := qemu.Config{Image: Image(t), Accel: Accel(t), Dir: dir}
	for _, c := range change {
		c(&config)
	}
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	defer cancel()
	started, err := qemu.Start(ctx, config)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	m := &Machine{VM: started, t: t, dir: dir}
	t.Cleanup(m.end)
	return m
}

// end stops the machine, unless the test has, and tells what there is to know if the test has failed.
func (m *Machine) end() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.t.Context()), Timeout)
	defer cancel()
	if err := m.Stop(ctx); err != nil {
		m.t.Errorf("stop: %v", err)
	}
	if err := syscall.Kill(m.PID(), 0); !errors.Is(err, syscall.ESRCH) {
		m.t.Errorf("QEMU is still there: pid %d, %v", m.PID(), err)
	}
	if m.t.Failed() {
		m.t.Logf("the machine was: %s\nits console was:\n%s", Quote(m.CommandLine()), console(m.dir))
	}
}

// console returns the whole of a console's log.
func console(dir string) string {
	var text strings.Builder
	for _, name := range []string{"console.log.1", "console.log"} {
		if raw, err := os.ReadFile(filepath.Join(dir, name)); err == nil {
			text.Write(raw)
		}
	}
	return qemu.Printable(text.String())
}

// Quote returns a command line that can be pasted into a shell.
func Quote(argv []string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_=,./:+@%", r)
	}
	words := make([]string, len(argv))
	for i, word := range argv {
		words[i] = word
		if word == "" || strings.ContainsFunc(word, func(r rune) bool { return !plain(r) }) {
			words[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}

// Dir returns a directory for a test that is kept if the test fails. Its name is short enough for sockets, and says whose
// it is, so that [Main] finds what is left in it.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", dirPrefix())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("kept: %s", dir)
			return
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return dir
}

// dirPrefix begins the name of every directory of this test process.
func dirPrefix() string { return "crust-vm-" + strconv.Itoa(os.Getpid()) + "-" }

// Context returns a context for one step of the test.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	t.Cleanup(cancel)
	return ctx
}

// Attach plugs a disk in.
func (m *Machine) Attach(t testing.TB, d qemu.Disk) {
	t.Helper()
	if err := m.AttachDisk(Context(t), d); err != nil {
		t.Fatalf("attach: %v", err)
	}
}

// Detach plugs it out.
func (m *Machine) Detach(t testing.TB, serial string) {
	t.Helper()
	if err := m.DetachDisk(Context(t), serial); err != nil {
		t.Fatalf("detach: %v", err)
	}
}

// TryMount is MountVolume, with the error made ours.
func (m *Machine) TryMount(t testing.TB, req *guestv1.MountVolumeRequest) (*guestv1.MountVolumeResponse, error) {
	t.Helper()
	resp, err := m.Agent().MountVolume(Context(t), req)
	return resp, rpc.FromWire(err)
}

// Mount is MountVolume, which has to succeed.
func (m *Machine) Mount(t testing.TB, req *guestv1.MountVolumeRequest) *guestv1.MountVolumeResponse {
	t.Helper()
	resp, err := m.TryMount(t, req)
	if err != nil {
		t.Fatalf("mount: %v", err)
	}
	return resp
}

// Unmount is UnmountVolume, which has to succeed.
func (m *Machine) Unmount(t testing.TB, path string) {
	t.Helper()
	if _, err := m.Agent().UnmountVolume(Context(t), &guestv1.UnmountVolumeRequest{MountPath: path}); err != nil {
		t.Fatalf("unmount: %v", rpc.FromWire(err))
	}
}

// Stats is GetVolumeStats, which has to succeed.
func (m *Machine) Stats(t testing.TB, path string) *guestv1.GetVolumeStatsResponse {
	t.Helper()
	resp, err := m.Agent().GetVolumeStats(Context(t), &guestv1.GetVolumeStatsRequest{MountPath: path})
	if err != nil {
		t.Fatalf("stats: %v", rpc.FromWire(err))
	}
	return resp
}
