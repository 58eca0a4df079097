package qemu_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/qemu/image"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

func TestMain(m *testing.M) { os.Exit(vm.Main(m)) }

func TestProbeOverride(t *testing.T) {
	for want, accel := range map[string]qemu.Accel{"kvm": qemu.KVM, "tcg": qemu.TCG} {
		if got, err := qemu.ProbeAccel(t.Context(), qemu.Probe{Want: want, Binary: "no-such-qemu"}); err != nil || got != accel {
			t.Errorf("%s: %q, %v", want, got, err)
		}
	}
	if _, err := qemu.ProbeAccel(t.Context(), qemu.Probe{Want: "xen"}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("an unknown one: %v", err)
	}
}

// needKVM skips where there is no /dev/kvm, whether or not it works. Where CRUST_REQUIRE contains "kvm" it fails instead.
func needKVM(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil && priv.Required("kvm") {
		t.Fatalf("CRUST_REQUIRE demands /dev/kvm: %v", err)
	}
	if err != nil {
		t.Skipf("without /dev/kvm there is nothing to probe: %v", err)
	}
	_ = f.Close()
}

// fakeQEMU makes a program that notes each of its starts, and then does what a script says.
func fakeQEMU(t *testing.T, script string) (program, notes string) {
	t.Helper()
	dir := t.TempDir()
	program, notes = filepath.Join(dir, "qemu"), filepath.Join(dir, "starts")
	content := fmt.Sprintf("#!/bin/sh\necho $$ >> %s\n%s\n", notes, script)
	if err := os.WriteFile(program, []byte(content), 0o700); err != nil {
		t.Fatal(err)
	}
	return program, notes
}

func starts(t *testing.T, notes string) []string {
	t.Helper()
	raw, err := os.ReadFile(notes)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Fields(string(raw))
}

func kernel(t *testing.T) image.Image {
	t.Helper()
	path := filepath.Join(t.TempDir(), "vmlinuz")
	if err := os.WriteFile(path, []byte("kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	return image.Image{Kernel: path, Initrd: path}
}

// TestProbeOfHangingKVM has a QEMU that does nothing at all, like a guest under a KVM that does not work.
func TestProbeOfHangingKVM(t *testing.T) {
	needKVM(t)
	program, notes := fakeQEMU(t, "exec sleep 1000")
	cache := filepath.Join(t.TempDir(), "sub", "accel.json")
	probe := qemu.Probe{Binary: program, Image: kernel(t), Cache: cache, Timeout: 200 * time.Millisecond}
	check := func(name string, runs int) {
		t.Helper()
		start := time.Now()
		accel, err := qemu.ProbeAccel(t.Context(), probe)
		if err != nil || accel != qemu.TCG {
			t.Errorf("%s: %q, %v", name, accel, err)
		}
		if waited := time.Since(start); waited > 30*time.Second {
			t.Errorf("%s: it took %v", name, waited)
		}
		pids := starts(t, notes)
		if len(pids) != runs {
			t.Errorf("%s: %d starts of QEMU, want %d", name, len(pids), runs)
		}
		for _, pid := range pids {
			if _, err := os.Stat("/proc/" + pid); err == nil {
				t.Errorf("%s: process %s is still there", name, pid)
			}
		}
	}
	check("the first time", 1)
	check("again", 1)
	for name, content := range map[string]string{"a corrupt cache": "{", "an empty cache": "", "a cache of something else": `{"key":"x","accel":"kvm"}`} {
		if err := os.WriteFile(cache, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		check(name, len(starts(t, notes))+1)
	}
	check("after that", len(starts(t, notes)))
	if err := os.WriteFile(probe.Image.Kernel, []byte("another kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("with another kernel", len(starts(t, notes))+1)
	probe.Cache = ""
	check("without a cache", len(starts(t, notes))+1)
}

func TestProbeThatFails(t *testing.T) {
	needKVM(t)
	if _, err := qemu.ProbeAccel(t.Context(), qemu.Probe{Binary: "no-such-qemu", Image: kernel(t)}); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("without QEMU: %v", err)
	}
	program, _ := fakeQEMU(t, "echo 'could not access KVM' >&2; exit 1")
	if accel, err := qemu.ProbeAccel(t.Context(), qemu.Probe{Binary: program, Image: kernel(t)}); err != nil || accel != qemu.TCG {
		t.Errorf("a QEMU that refuses: %q, %v", accel, err)
	}
	program, _ = fakeQEMU(t, "exec sleep 1000")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := qemu.ProbeAccel(ctx, qemu.Probe{Binary: program, Image: kernel(t)}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("when there is no time: %v", err)
	}
}

// TestProbeBootsAGuest is the real thing: whatever the answer is, it comes in time, and a guest boots with it.
func TestProbeBootsAGuest(t *testing.T) {
	vm.Need(t)
	needKVM(t)
	accel, err := qemu.ProbeAccel(t.Context(), qemu.Probe{Image: vm.Image(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("guests run under %s", accel)
	vm.Start(t, func(c *qemu.Config) { c.Accel = accel })
}

func TestStartFails(t *testing.T) {
	program, _ := fakeQEMU(t, "echo 'no such machine' >&2; exit 1")
	dir := t.TempDir()
	config := qemu.Config{Binary: program, Image: kernel(t), Dir: dir, Accel: qemu.TCG}
	if _, err := qemu.Start(t.Context(), config); err == nil || !strings.Contains(err.Error(), "no such machine") {
		t.Errorf("a QEMU that refuses: %v", err)
	}
	config.Dir = filepath.Join(dir, "missing")
	if _, err := qemu.Start(t.Context(), config); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a directory: %v", err)
	}
	config.Dir = ""
	if _, err := qemu.Start(t.Context(), config); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("with a bad configuration: %v", err)
	}
}
