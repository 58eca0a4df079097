package guest_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest"
	"crust.dev/crust/runtimehandler/guest/device"
)

// newAgent returns an agent on a machine without devices.
func newAgent(t *testing.T) *guest.Agent {
	t.Helper()
	a, err := guest.New(guest.Config{Version: "v1", Port: "p", Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	a.SetDevices(device.Finder{Sys: t.TempDir(), Dev: t.TempDir()})
	return a
}

func good() *guestv1.MountVolumeRequest {
	return &guestv1.MountVolumeRequest{Serial: "s", MountPath: "/m", FsType: "ext4"}
}

func TestMountRequests(t *testing.T) {
	a := newAgent(t)
	for name, change := range map[string]func(*guestv1.MountVolumeRequest){
		"no serial":                   func(r *guestv1.MountVolumeRequest) { r.Serial = "" },
		"a serial that is too long":   func(r *guestv1.MountVolumeRequest) { r.Serial = strings.Repeat("s", 21) },
		"a serial with a space":       func(r *guestv1.MountVolumeRequest) { r.Serial = "a b" },
		"no mount path":               func(r *guestv1.MountVolumeRequest) { r.MountPath = "" },
		"a relative mount path":       func(r *guestv1.MountVolumeRequest) { r.MountPath = "m" },
		"a mount path with dots":      func(r *guestv1.MountVolumeRequest) { r.MountPath = "/m/../x" },
		"a mount path with a slash":   func(r *guestv1.MountVolumeRequest) { r.MountPath = "/m/" },
		"the root":                    func(r *guestv1.MountVolumeRequest) { r.MountPath = "/" },
		"no filesystem type":          func(r *guestv1.MountVolumeRequest) { r.FsType = "" },
		"an unknown filesystem type":  func(r *guestv1.MountVolumeRequest) { r.FsType = "ntfs" },
		"an option without a meaning": func(r *guestv1.MountVolumeRequest) { r.MountFlags = []string{"bind"} },
		"a negative size":             func(r *guestv1.MountVolumeRequest) { r.MinDeviceBytes = -1 },
		"an unknown format policy":    func(r *guestv1.MountVolumeRequest) { r.Format = 99 },
		"a policy without a group": func(r *guestv1.MountVolumeRequest) {
			r.SupplementalGroupChangePolicy = guestv1.GroupChangePolicy_GROUP_CHANGE_POLICY_ALWAYS
		},
		"an unknown group policy": func(r *guestv1.MountVolumeRequest) {
			r.SupplementalGroup, r.SupplementalGroupChangePolicy = new(uint32), 99
		},
		"no group id": func(r *guestv1.MountVolumeRequest) {
			none := uint32(math.MaxUint32)
			r.SupplementalGroup = &none
		},
	} {
		req := good()
		change(req)
		if _, err := a.MountVolume(t.Context(), req); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	unchanged(t, a)
}

func TestOtherRequests(t *testing.T) {
	a := newAgent(t)
	ctx := t.Context()
	bad := "relative"
	for name, call := range map[string]func() error{
		"unmount": func() error {
			_, err := a.UnmountVolume(ctx, &guestv1.UnmountVolumeRequest{MountPath: bad})
			return err
		},
		"stats": func() error {
			_, err := a.GetVolumeStats(ctx, &guestv1.GetVolumeStatsRequest{MountPath: bad})
			return err
		},
		"grow": func() error { _, err := a.GrowVolume(ctx, &guestv1.GrowVolumeRequest{MountPath: bad}); return err },
		"grow to less than nothing": func() error {
			_, err := a.GrowVolume(ctx, &guestv1.GrowVolumeRequest{MountPath: "/m", MinDeviceBytes: -1})
			return err
		},
		"freeze": func() error {
			_, err := a.FreezeVolume(ctx, &guestv1.FreezeVolumeRequest{MountPath: bad, TimeLimit: durationpb.New(time.Second)})
			return err
		},
		"freeze for ever": func() error {
			_, err := a.FreezeVolume(ctx, &guestv1.FreezeVolumeRequest{MountPath: "/m"})
			return err
		},
		"freeze for too long": func() error {
			_, err := a.FreezeVolume(ctx, &guestv1.FreezeVolumeRequest{MountPath: "/m", TimeLimit: durationpb.New(61 * time.Second)})
			return err
		},
		"freeze for an odd time": func() error {
			_, err := a.FreezeVolume(ctx, &guestv1.FreezeVolumeRequest{MountPath: "/m", TimeLimit: &durationpb.Duration{Seconds: 1, Nanos: -1}})
			return err
		},
		"thaw": func() error { _, err := a.ThawVolume(ctx, &guestv1.ThawVolumeRequest{MountPath: bad}); return err },
		"trim": func() error { _, err := a.TrimVolume(ctx, &guestv1.TrimVolumeRequest{MountPath: bad}); return err },
		"bind": func() error {
			_, err := a.BindPath(ctx, &guestv1.BindPathRequest{MountPath: bad, Destination: "/d"})
			return err
		},
		"bind to nowhere": func() error { _, err := a.BindPath(ctx, &guestv1.BindPathRequest{MountPath: "/m"}); return err },
		"bind from above": func() error {
			_, err := a.BindPath(ctx, &guestv1.BindPathRequest{MountPath: "/m", SubPath: "../x", Destination: "/d"})
			return err
		},
		"a signal that is none": func() error {
			_, err := a.SignalExec(ctx, &guestv1.SignalExecRequest{ExecId: "1", Signal: 65})
			return err
		},
		"no signal": func() error { _, err := a.SignalExec(ctx, &guestv1.SignalExecRequest{ExecId: "1"}); return err },
		"too much input": func() error {
			_, err := a.WriteExec(ctx, &guestv1.WriteExecRequest{ExecId: "1", Data: make([]byte, 64<<10+1)})
			return err
		},
	} {
		if err := call(); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, call := range map[string]func() error{
		"stats": func() error {
			_, err := a.GetVolumeStats(ctx, &guestv1.GetVolumeStatsRequest{MountPath: "/m"})
			return err
		},
		"grow": func() error { _, err := a.GrowVolume(ctx, &guestv1.GrowVolumeRequest{MountPath: "/m"}); return err },
		"freeze": func() error {
			_, err := a.FreezeVolume(ctx, &guestv1.FreezeVolumeRequest{MountPath: "/m", TimeLimit: durationpb.New(time.Second)})
			return err
		},
		"thaw": func() error { _, err := a.ThawVolume(ctx, &guestv1.ThawVolumeRequest{MountPath: "/m"}); return err },
		"trim": func() error { _, err := a.TrimVolume(ctx, &guestv1.TrimVolumeRequest{MountPath: "/m"}); return err },
		"bind": func() error {
			_, err := a.BindPath(ctx, &guestv1.BindPathRequest{MountPath: "/m", Destination: "/d"})
			return err
		},
		"read": func() error { _, err := a.ReadExec(ctx, &guestv1.ReadExecRequest{ExecId: "1"}); return err },
	} {
		if err := call(); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%s of what is not there: %v", name, err)
		}
	}
	if _, err := a.UnmountVolume(ctx, &guestv1.UnmountVolumeRequest{MountPath: "/no/such/place"}); err != nil {
		t.Errorf("unmount of what is not mounted: %v", err)
	}
	unchanged(t, a)
}

func unchanged(t *testing.T, a *guest.Agent) {
	t.Helper()
	if v, s, d := a.Known(); v != 0 || s != 0 || d != 0 {
		t.Errorf("the agent keeps %d volumes, %d serials, %d destinations", v, s, d)
	}
}

// TestSlowVolumes: a volume whose device does not appear holds up nobody but those who ask for it.
func TestSlowVolumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t)
		slow := make(chan error, 1)
		go func() {
			_, err := a.MountVolume(t.Context(), good())
			slow <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := a.UnmountVolume(ctx, &guestv1.UnmountVolumeRequest{MountPath: "/m"}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("another call for the same path: %v", err)
		}
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := a.UnmountVolume(ctx, &guestv1.UnmountVolumeRequest{MountPath: "/other"}); err != nil {
			t.Errorf("a call for another path: %v", err)
		}
		elsewhere := good()
		elsewhere.MountPath = "/elsewhere"
		if _, err := a.MountVolume(ctx, elsewhere); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("the same device at another path: %v", err)
		}
		if _, err := a.GetVolumeStats(ctx, &guestv1.GetVolumeStatsRequest{MountPath: "/m"}); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("statistics of a volume that is not mounted yet: %v", err)
		}
		start := time.Now()
		if err := <-slow; !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("the slow one: %v", err)
		}
		if waited := time.Since(start); waited > 2*time.Minute {
			t.Errorf("it has waited for %v", waited)
		}
		unchanged(t, a)
	})
}

// TestAnswersBeforeTheDeadline: the answer that a device has not appeared must still find somebody who listens.
func TestAnswersBeforeTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := a.MountVolume(ctx, good())
		if !errors.Is(err, errdefs.ErrNotFound) || ctx.Err() != nil {
			t.Errorf("%v, %v", err, ctx.Err())
		}
	})
}

func TestFindsBySerial(t *testing.T) {
	sys, dev := t.TempDir(), t.TempDir()
	add := func(name, serial, size, ro string) {
		t.Helper()
		dir := filepath.Join(sys, "block", name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for file, content := range map[string]string{"serial": serial, "size": size, "ro": ro} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dev, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	add("vda", "other", "8\n", "0\n")
	add("vdb", "mine", "16\n", "1\n")
	add("vdc", "mine-too", "8\n", "0\n")
	f := device.Finder{Sys: sys, Dev: dev}
	d, err := f.Find(t.Context(), "mine")
	if err != nil || d.Name != "vdb" || d.Path != filepath.Join(dev, "vdb") {
		t.Fatalf("%+v, %v", d, err)
	}
	if size, err := d.Size(); err != nil || size != 16*512 {
		t.Errorf("size %d, %v", size, err)
	}
	if ro, err := d.ReadOnly(); err != nil || !ro {
		t.Errorf("read-only %v, %v", ro, err)
	}
	add("vdd", "mine", "8\n", "0\n")
	if _, err := f.Find(t.Context(), "mine"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("two with one serial: %v", err)
	}
}

func TestWaitsForSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sys, dev := t.TempDir(), t.TempDir()
		dir := filepath.Join(sys, "block", "vda")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		set := func(file, content string) { // at once, as the kernel does: whoever reads meanwhile never sees half of it
			next := filepath.Join(sys, file)
			if err := errors.Join(os.WriteFile(next, []byte(content), 0o600), os.Rename(next, filepath.Join(dir, file))); err != nil {
				t.Error(err)
			}
		}
		set("serial", "s")
		set("size", "8")
		if err := os.WriteFile(filepath.Join(dev, "vda"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		d, err := device.Finder{Sys: sys, Dev: dev}.Find(t.Context(), "s")
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(10*time.Second, func() { set("size", "16") })
		if size, err := d.WaitSize(t.Context(), 16*512); err != nil || size != 16*512 {
			t.Errorf("%d, %v", size, err)
		}
		if _, err := d.WaitSize(t.Context(), 32*512); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "8192 bytes") {
			t.Errorf("a size that never comes: %v", err)
		}
	})
}
