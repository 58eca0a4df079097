// Package handlertest holds implementations of runtimehandler.Handler to their promises. An implementation's test gives
// [Run] a runtime of its kind, as real as it can be had, and the suite plays the daemon.
package handlertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler"
)

// Runtime is the runtime behind a handler, as the suite needs it.
type Runtime interface {
	// Handler returns a handler for the runtime: a new one at each call, as after a restart of the daemon.
	Handler() runtimehandler.Handler
	// Mount does what the runtime does when a sandbox starts that uses a staged volume. It returns when the filesystem is
	// mounted, and fails the test if the runtime does not find the volume.
	Mount(t *testing.T, d runtimehandler.Deferral) runtimehandler.Sandbox
	// Unmount ends that sandbox in good order.
	Unmount(t *testing.T, d runtimehandler.Deferral)
	// Hang has the sandbox not answer any more; it is still there.
	Hang(t *testing.T, d runtimehandler.Deferral)
	// Lose takes away what the handler has staged, as a reboot does. It does nothing if nothing is kept that could be lost.
	Lose(t *testing.T)
}

// patience is how long anything may take that is not meant to wait.
const patience = 30 * time.Second

// Run runs the suite. start is called once per subtest.
func Run(t *testing.T, start func(t *testing.T) Runtime) {
	for name, test := range map[string]func(*testing.T, Runtime){
		"its name and abilities are constant":            testConstants,
		"staging is idempotent":                          testStage,
		"unstaging is idempotent":                        testUnstage,
		"deferrals do not get in each other's way":       testParallel,
		"status tells whether a sandbox has the volume":  testStatus,
		"stats come from the sandbox":                    testStats,
		"expansion reaches the sandbox and only grows":   testExpand,
		"freezing works or is refused":                   testFreeze,
		"a sandbox that hangs costs its caller's time":   testHang,
		"a caller that has given up is not kept waiting": testCancelled,
		"sweeping puts back what is lost":                testSweepRestores,
		"sweeping takes back what is no longer staged":   testSweepRemoves,
	} {
		t.Run(name, func(t *testing.T) { test(t, start(t)) })
	}
}

// deferral returns one with a device of its own.
func deferral(t *testing.T, name string) runtimehandler.Deferral {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	device := filepath.Join(dir, name+".img")
	const size = 64 << 20
	if err := os.WriteFile(device, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(device, size); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(dir, "pods", name, "mount")
	if err := os.MkdirAll(target, 0o750); err != nil {
		t.Fatal(err)
	}
	return runtimehandler.Deferral{
		Driver: "csi.example.com", VolumeID: name, TargetPath: target, Device: device, Serial: runtimehandler.Serial("csi.example.com", name),
		SizeBytes: size, FSType: "ext4", MountFlags: []string{"noatime"},
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func stage(t *testing.T, h runtimehandler.Handler, d runtimehandler.Deferral) {
	t.Helper()
	if err := h.Stage(within(t), d); err != nil {
		t.Fatalf("stage: %v", err)
	}
}

func testConstants(t *testing.T, r Runtime) {
	a, b := r.Handler(), r.Handler()
	if !regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`).MatchString(a.Name()) {
		t.Errorf("name %q is not a DNS label", a.Name())
	}
	if a.Name() != b.Name() || a.Capabilities() != b.Capabilities() {
		t.Error("two handlers of one configuration differ")
	}
	if diff := cmp.Diff(a.Roots(), b.Roots()); diff != "" {
		t.Errorf("roots: %s", diff)
	}
	for _, root := range a.Roots() {
		if !filepath.IsAbs(root) {
			t.Errorf("root %q is not absolute", root)
		}
	}
}

func testStage(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	for range 2 {
		stage(t, r.Handler(), d)
	}
	other := d
	other.MountFlags = []string{"noatime", "nodev"}
	other.Driver, other.VolumeID = "csi.example.com", "v2"
	stage(t, r.Handler(), other)
	r.Mount(t, other)
}

func testUnstage(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	h := r.Handler()
	if err := h.Unstage(within(t), d.TargetPath); err != nil {
		t.Errorf("what was never staged: %v", err)
	}
	stage(t, h, d)
	for range 2 {
		if err := r.Handler().Unstage(within(t), d.TargetPath); err != nil {
			t.Errorf("unstage: %v", err)
		}
	}
	status, err := h.Status(within(t), d.TargetPath, nil)
	if err != nil || status.Sandbox != nil {
		t.Errorf("status afterwards: %+v, %v", status, err)
	}
}

func testParallel(t *testing.T, r Runtime) {
	h := r.Handler()
	var work sync.WaitGroup
	for i := range 16 {
		d := deferral(t, fmt.Sprintf("v%d", i))
		work.Go(func() {
			for range 4 {
				if err := h.Stage(t.Context(), d); err != nil {
					t.Errorf("stage: %v", err)
				}
				if err := h.Unstage(t.Context(), d.TargetPath); err != nil {
					t.Errorf("unstage: %v", err)
				}
			}
		})
	}
	work.Wait()
}

func testStatus(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	stage(t, r.Handler(), d)
	status, err := r.Handler().Status(within(t), d.TargetPath, nil)
	if err != nil || status.Sandbox != nil || status.Mounted {
		t.Errorf("before a sandbox: %+v, %v", status, err)
	}
	sandbox := r.Mount(t, d)
	status, err = r.Handler().Status(within(t), d.TargetPath, &sandbox)
	if err != nil || status.Sandbox == nil || *status.Sandbox != sandbox || !status.Mounted {
		t.Errorf("in a sandbox: %+v, %v; want %+v", status, err, sandbox)
	}
	r.Unmount(t, d)
	status, err = r.Handler().Status(within(t), d.TargetPath, &sandbox)
	if err == nil && status.Mounted || err != nil && !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("after the sandbox: %+v, %v", status, err)
	}
}

func testStats(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	stage(t, r.Handler(), d)
	sandbox := r.Mount(t, d)
	stats, err := r.Handler().Stats(within(t), d.TargetPath, sandbox)
	if err != nil {
		t.Fatal(err)
	}
	if stats.Bytes.Total <= 0 || stats.Bytes.Total > d.SizeBytes || stats.Bytes.Used+stats.Bytes.Available > stats.Bytes.Total || stats.Inodes.Total <= 0 {
		t.Errorf("stats of a volume of %d bytes: %+v", d.SizeBytes, stats)
	}
	gone(t, "stats of a volume that the sandbox does not have", func(ctx context.Context) error {
		_, err := r.Handler().Stats(ctx, d.TargetPath+"-other", sandbox)
		return err
	})
	r.Unmount(t, d)
	gone(t, "stats from a sandbox that has ended", func(ctx context.Context) error {
		_, err := r.Handler().Stats(ctx, d.TargetPath, sandbox)
		return err
	})
}

// gone checks that an error says that there is nothing, or nobody to say so.
func gone(t *testing.T, what string, call func(context.Context) error) {
	t.Helper()
	err := call(within(t))
	if !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("%s: %v, want ErrNotFound or ErrUnavailable", what, err)
	}
}

func testExpand(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	h := r.Handler()
	stage(t, h, d)
	sandbox := r.Mount(t, d)
	if !h.Capabilities().OnlineExpand {
		_, err := h.Expand(within(t), d.TargetPath, sandbox, d.SizeBytes)
		if !errors.Is(err, errdefs.ErrNotImplemented) && !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("expand: %v, want a refusal", err)
		}
		return
	}
	grown := 2 * d.SizeBytes
	if err := os.Truncate(d.Device, grown); err != nil {
		t.Fatal(err)
	}
	for _, required := range []int64{grown, grown, 0, d.SizeBytes} {
		size, err := r.Handler().Expand(within(t), d.TargetPath, sandbox, required)
		if err != nil || size != grown {
			t.Errorf("expand to %d at least: %d, %v; want %d", required, size, err, grown)
		}
	}
	stats, err := h.Stats(within(t), d.TargetPath, sandbox)
	if err != nil || stats.Bytes.Total <= d.SizeBytes {
		t.Errorf("stats after the expansion: %+v, %v", stats, err)
	}
	gone(t, "expanding what the sandbox does not have", func(ctx context.Context) error {
		_, err := h.Expand(ctx, d.TargetPath+"-other", sandbox, 0)
		return err
	})
}

func testFreeze(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	h := r.Handler()
	stage(t, h, d)
	sandbox := r.Mount(t, d)
	if !h.Capabilities().Freeze {
		for what, err := range map[string]error{
			"freeze": h.Freeze(within(t), d.TargetPath, sandbox, time.Second),
			"thaw":   h.Thaw(within(t), d.TargetPath, sandbox),
		} {
			if !errors.Is(err, errdefs.ErrNotImplemented) {
				t.Errorf("%s: %v, want ErrNotImplemented", what, err)
			}
		}
		return
	}
	if err := h.Thaw(within(t), d.TargetPath, sandbox); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("thawing what is not frozen: %v", err)
	}
	if err := h.Freeze(within(t), d.TargetPath, sandbox, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := h.Freeze(within(t), d.TargetPath, sandbox, time.Minute); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("freezing twice: %v", err)
	}
	if err := h.Thaw(within(t), d.TargetPath, sandbox); err != nil {
		t.Error(err)
	}
}

func testHang(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	h := r.Handler()
	stage(t, h, d)
	sandbox := r.Mount(t, d)
	r.Hang(t, d)
	for what, call := range map[string]func(context.Context) error{
		"stats":  func(ctx context.Context) error { _, err := h.Stats(ctx, d.TargetPath, sandbox); return err },
		"expand": func(ctx context.Context) error { _, err := h.Expand(ctx, d.TargetPath, sandbox, 0); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		err := call(ctx)
		cancel()
		if !errors.Is(err, errdefs.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, errdefs.ErrNotImplemented) && !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%s of a sandbox that hangs: %v", what, err)
		}
	}
}

func testCancelled(t *testing.T, r Runtime) {
	d := deferral(t, "v1")
	h := r.Handler()
	stage(t, h, d)
	sandbox := r.Mount(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.Stats(ctx, d.TargetPath, sandbox); err == nil {
		t.Error("stats for nobody")
	}
	if _, err := h.Stats(within(t), d.TargetPath, sandbox); err != nil {
		t.Errorf("stats afterwards: %v", err)
	}
}

func testSweepRestores(t *testing.T, r Runtime) {
	a, b := deferral(t, "v1"), deferral(t, "v2")
	stage(t, r.Handler(), a)
	stage(t, r.Handler(), b)
	r.Lose(t)
	left, err := r.Handler().Sweep(within(t), []runtimehandler.Deferral{a, b})
	if err != nil || len(left) != 0 {
		t.Errorf("sweep: %+v, %v", left, err)
	}
	r.Mount(t, a)
	r.Mount(t, b)
}

func testSweepRemoves(t *testing.T, r Runtime) {
	a, b := deferral(t, "v1"), deferral(t, "v2")
	stage(t, r.Handler(), a)
	stage(t, r.Handler(), b)
	for range 2 {
		left, err := r.Handler().Sweep(within(t), []runtimehandler.Deferral{b})
		if err != nil || len(left) != 0 {
			t.Errorf("sweep: %+v, %v", left, err)
		}
	}
	status, err := r.Handler().Status(within(t), a.TargetPath, nil)
	if err != nil || status.Sandbox != nil {
		t.Errorf("status of what is no longer staged: %+v, %v", status, err)
	}
	r.Mount(t, b)
}
