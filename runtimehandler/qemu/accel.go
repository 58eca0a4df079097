package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu/image"
)

// kvmDevice is how a process gets at the processor's virtualization.
const kvmDevice = "/dev/kvm"

// probeTimeout is how long a guest may take to boot under KVM before KVM counts as unusable. A working one takes one or
// two seconds, nested ones several.
const probeTimeout = 15 * time.Second

// Probe says how to find out which accelerator works.
type Probe struct {
	// Want is "kvm" or "tcg", which is then what is used, or "auto" or nothing.
	Want string
	// Binary and Image are those of [Config].
	Binary string
	Image  image.Image
	// Cache is a file that remembers the answer until the host reboots, or the kernel or QEMU change; empty is none.
	Cache string
	// Timeout is how long a guest may take to boot; 0 is 15 s.
	Timeout time.Duration
	// Log is told if KVM is there and does not work; nil is the default logger.
	Log *slog.Logger
}

// ProbeAccel finds out whether a guest boots under KVM, by booting one: where virtualization is nested, /dev/kvm may open
// and the guest hang all the same. The answer is TCG if it does not. An error means that no guest can be booted at all, or
// that ctx has ended.
func ProbeAccel(ctx context.Context, p Probe) (Accel, error) {
	switch p.Want {
	case string(KVM), string(TCG):
		return Accel(p.Want), nil
	case "", "auto":
	default:
		return "", fmt.Errorf("accelerator %q: want kvm, tcg or auto: %w", p.Want, errdefs.ErrInvalidArgument)
	}
	f, err := os.OpenFile(kvmDevice, os.O_RDWR, 0)
	if err != nil {
		return TCG, nil // not there, or not ours to use
	}
	_ = f.Close()
	key, err := p.key()
	if err != nil {
		return "", fmt.Errorf("probe kvm: %w", err)
	}
	if accel, ok := p.cached(key); ok {
		return accel, nil
	}
	accel, err := p.boot(ctx)
	if err != nil {
		return "", fmt.Errorf("probe kvm: %w", err)
	}
	p.remember(ctx, key, accel)
	return accel, nil
}

func (p Probe) log() *slog.Logger {
	if p.Log == nil {
		return slog.Default()
	}
	return p.Log
}

func (p Probe) binary() string {
	if p.Binary == "" {
		return DefaultBinary
	}
	return p.Binary
}

// boot boots a guest under KVM and ends it again.
func (p Probe) boot(ctx context.Context) (Accel, error) {
	dir, err := os.MkdirTemp("", "crust-probe-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	timeout := p.Timeout
	if timeout == 0 {
		timeout = probeTimeout
	}
	bootCtx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	vm, err := Start(bootCtx, Config{Binary: p.Binary, Image: p.Image, Dir: dir, Accel: KVM, NoVsock: true, Log: p.Log})
	switch {
	case err == nil:
		vm.Kill()
		return KVM, nil
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case errors.Is(err, errdefs.ErrNotFound), errors.Is(err, errdefs.ErrInvalidArgument):
		return "", err // there is no QEMU, or the image is none: TCG would fail as well
	}
	p.log().WarnContext(ctx, "KVM is there, but a guest does not boot under it; instructions are translated instead, which is slow", rpc.LogError, err)
	return TCG, nil
}

// key is a digest over what the answer depends on.
func (p Probe) key() (string, error) {
	binary, err := exec.LookPath(p.binary())
	if err != nil {
		return "", fmt.Errorf("%w; install Debian's package qemu-system-x86: %w", err, errdefs.ErrNotFound)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintln(h, strings.TrimSpace(string(boot)))
	for _, path := range []string{binary, p.Image.Kernel} {
		info, err := os.Stat(path)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, path, info.Size(), info.ModTime().UnixNano())
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// answer is what the cache has.
type answer struct {
	Key   string `json:"key"`
	Accel Accel  `json:"accel"`
}

// cached returns a remembered answer. A cache that cannot be read, or makes no sense, has none.
func (p Probe) cached(key string) (Accel, bool) {
	if p.Cache == "" {
		return "", false
	}
	raw, err := os.ReadFile(p.Cache)
	if err != nil {
		return "", false
	}
	var a answer
	if json.Unmarshal(raw, &a) != nil || a.Key != key || a.Accel != KVM && a.Accel != TCG {
		return "", false
	}
	return a.Accel, true
}

// remember writes the answer, whole or not at all. Without it the next probe takes its time again, so that a failure is no
// error.
func (p Probe) remember(ctx context.Context, key string, accel Accel) {
	if p.Cache == "" {
		return
	}
	if err := writeWhole(p.Cache, answer{Key: key, Accel: accel}); err != nil {
		p.log().WarnContext(ctx, "the answer of the KVM probe is not remembered", rpc.LogPath, p.Cache, rpc.LogError, err)
	}
}

func writeWhole(path string, value any) (err error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".accel-")
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
