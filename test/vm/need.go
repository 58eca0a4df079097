package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/qemu/image"
	"crust.dev/crust/test/priv"
)

// ToolPath is where the program test/vm/tool is in the guest.
const ToolPath = "/usr/bin/tool"

// Need skips a test where something is missing to boot a VM. Where CRUST_REQUIRE contains "vm", as in CI, it fails instead.
func Need(t testing.TB) {
	t.Helper()
	if testing.Short() && !priv.Required("vm") {
		t.Skip("boots a VM")
	}
	_, err := environment()
	switch {
	case err == nil:
	case priv.Required("vm"):
		t.Fatalf("CRUST_REQUIRE demands VMs: %v", err)
	case errors.Is(err, errdefs.ErrNotFound):
		t.Skipf("needs a VM: %v", err)
	default:
		t.Fatalf("a VM should be possible here: %v", err)
	}
}

// Image is the guest image for tests.
func Image(t testing.TB) image.Image {
	t.Helper()
	return must(t).image
}

// ImageWith is the guest image for tests with more files.
func ImageWith(t testing.TB, more ...image.File) image.Image {
	t.Helper()
	cache, err := cacheDir()
	if err != nil {
		t.Fatal(err)
	}
	made, err := guestImage(Context(t), cache, more)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// Accel is the accelerator for tests.
func Accel(t testing.TB) qemu.Accel {
	t.Helper()
	return must(t).accel
}

func must(t testing.TB) env {
	t.Helper()
	e, err := environment()
	if err != nil {
		t.Fatalf("no VM (does the test call vm.Need?): %v", err)
	}
	return e
}

// env is what all VMs of a test process have in common.
type env struct {
	image image.Image
	accel qemu.Accel
}

// prepareTimeout bounds the build of the image and the probe of the accelerator.
const prepareTimeout = 3 * time.Minute

var environment = sync.OnceValues(func() (env, error) {
	ctx, cancel := context.WithTimeout(context.Background(), prepareTimeout)
	defer cancel()
	if _, err := exec.LookPath(qemu.DefaultBinary); err != nil {
		return env{}, fmt.Errorf("%w; install Debian's package qemu-system-x86: %w", err, errdefs.ErrNotFound)
	}
	cache, err := cacheDir()
	if err != nil {
		return env{}, err
	}
	guest, err := guestImage(ctx, cache, nil)
	if err != nil {
		return env{}, err
	}
	accel, err := qemu.ProbeAccel(ctx, qemu.Probe{Want: os.Getenv("CRUST_ACCEL"), Image: guest, Cache: filepath.Join(cache, "accel.json")})
	return env{image: guest, accel: accel}, err
})

// cacheDir is where images and the answer of the probe are kept between test processes.
func cacheDir() (string, error) {
	base := os.Getenv("XDG_CACHE_HOME")
	if base == "" {
		base = "/var/cache"
		if os.Geteuid() != 0 {
			var err error
			if base, err = os.UserCacheDir(); err != nil {
				return "", err
			}
		}
	}
	return filepath.Join(base, "crust", "test"), nil
}

// KernelDir is where a kernel package was unpacked.
func KernelDir() string {
	if dir := os.Getenv("CRUST_KERNEL_DIR"); dir != "" {
		return dir
	}
	base := os.Getenv("XDG_CACHE_HOME")
	if base == "" {
		base = "/var/cache"
	}
	return filepath.Join(base, "crust", "kernel")
}

func guestImage(ctx context.Context, cache string, more []image.File) (image.Image, error) {
	given := image.Image{Kernel: os.Getenv("CRUST_GUEST_KERNEL"), Initrd: os.Getenv("CRUST_GUEST_INITRD")}
	if given.Kernel != "" && given.Initrd != "" {
		return given, nil
	}
	kernel, err := image.FindKernel(KernelDir())
	if err != nil {
		return image.Image{}, fmt.Errorf("%w; go run ./test/setup does it, and CRUST_KERNEL_DIR names another directory", err)
	}
	built, err := os.MkdirTemp("", "crust-build-")
	if err != nil {
		return image.Image{}, err
	}
	defer os.RemoveAll(built)
	for _, pkg := range []string{"cmd/crust-agent", "test/vm/tool"} {
		if err := build(ctx, built, "crust.dev/crust/"+pkg); err != nil {
			return image.Image{}, err
		}
	}
	prune(cache)
	return image.Ensure(ctx, image.Config{
		Agent:  filepath.Join(built, "crust-agent"),
		Kernel: kernel,
		Extra:  append(more, image.File{Path: ToolPath, Source: filepath.Join(built, "tool"), Mode: 0o755}),
	}, cache)
}

func build(ctx context.Context, dir, pkg string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", dir+"/", pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s: %w: %s", pkg, err, out)
	}
	return nil
}

// maxAge is how long the images of former trees are kept.
const maxAge = 24 * time.Hour

// prune removes old images. Another process may do the same.
func prune(cache string) {
	images, _ := filepath.Glob(filepath.Join(cache, "initrd-*"))
	for _, path := range images {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > maxAge {
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				fmt.Fprintf(os.Stderr, "vm: %v\n", err)
			}
		}
	}
}
