package qemu

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu/image"
)

// Accel is what executes the guest's instructions.
type Accel string

const (
	// KVM is the processor.
	KVM Accel = "kvm"
	// TCG is QEMU's translator; it works everywhere and is many times slower.
	TCG Accel = "tcg"
)

// MaxDisks is how many disks a VM can have at a time: each has a PCIe port of its own, and ports are made at the start.
const MaxDisks = 24

// The defaults of [Config].
const (
	DefaultBinary    = "qemu-system-x86_64"
	DefaultMemoryMiB = 512
	DefaultCPUs      = 1
)

// minMemoryMiB is what the kernel needs to unpack the image and to run the tools that check filesystems.
const minMemoryMiB = 192

// Config is a VM.
type Config struct {
	// Binary is QEMU; empty is DefaultBinary, looked up in PATH.
	Binary string
	// Image is what is booted.
	Image image.Image
	// Dir is an empty directory, of our user only, for the console's log. It stays when the VM ends.
	Dir string
	// Accel is KVM or TCG; see [ProbeAccel].
	Accel Accel
	// CPUs and MemoryMiB are the guest's; 0 is the default.
	CPUs, MemoryMiB int
	// NoVsock has the agent reached over a virtio-serial port even where there is /dev/vhost-vsock.
	NoVsock bool
	// NoSeccomp runs QEMU without its system call filter, for builds that have none.
	NoSeccomp bool
	// KernelArgs are added to the kernel's command line.
	KernelArgs []string
	// AgentArgs are added to the agent's command line.
	AgentArgs []string
	// Log gets what an operator may want to know; nil is the default logger.
	Log *slog.Logger
}

// withDefaults fills in what is empty, and checks the rest.
func (c Config) withDefaults() (Config, error) {
	if c.Binary == "" {
		c.Binary = DefaultBinary
	}
	if c.CPUs == 0 {
		c.CPUs = DefaultCPUs
	}
	if c.MemoryMiB == 0 {
		c.MemoryMiB = DefaultMemoryMiB
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	fail := func(format string, args ...any) (Config, error) {
		return c, fmt.Errorf("vm: "+format+": %w", append(args, errdefs.ErrInvalidArgument)...)
	}
	switch {
	case c.Accel != KVM && c.Accel != TCG:
		return fail("accelerator %q: want %q or %q", c.Accel, KVM, TCG)
	case c.CPUs < 1 || c.CPUs > 255:
		return fail("%d processors: want 1 to 255", c.CPUs)
	case c.MemoryMiB < minMemoryMiB:
		return fail("%d MiB of memory: want %d at least", c.MemoryMiB, minMemoryMiB)
	}
	for _, path := range []string{c.Dir, c.Image.Kernel, c.Image.Initrd} {
		// A comma would end the value in an option of QEMU.
		if !filepath.IsAbs(path) || strings.Contains(path, ",") {
			return fail("path %q: want an absolute one without commas", path)
		}
	}
	return c, nil
}
