package containerdshim

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"go.yaml.in/yaml/v4"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/sandbox"
)

// DefaultConfigPath is the file that is read if containerd's configuration names no other; it may be missing.
const DefaultConfigPath = "/etc/crust/containerd-shim.yaml"

// maxSandboxes is what unix(7) leaves of its 107 bytes beside containerd's ids, of 64 bytes, and the names of sockets.
const maxSandboxes = 107 - len("/") - 64 - len("/control.sock")

// Config is the file of the shim. Paths are absolute.
type Config struct {
	// Image is the directory of the guest's image, as crust-sandbox image makes it.
	Image string `yaml:"image"`
	// Accel is kvm, tcg or auto, and AccelCache where auto notes what it has found.
	Accel      string `yaml:"accel"`
	AccelCache string `yaml:"accelCache"`
	// MemoryMiB and CPUs are the guest's.
	MemoryMiB int `yaml:"memoryMiB"`
	CPUs      int `yaml:"cpus"`
	// RuntimeEndpoint is crustd's socket for shims.
	RuntimeEndpoint string `yaml:"runtimeEndpoint"`
	// Sandboxes is where the directories of sandboxes are.
	Sandboxes string `yaml:"sandboxes"`
	// RootBytes is how much a container can write to its root filesystem, beyond what its image has.
	RootBytes int64 `yaml:"rootBytes"`
}

// defaults are what holds where the file says nothing.
func defaults() Config {
	return Config{
		Image: "/var/cache/crust/image", Accel: "auto", AccelCache: "/run/crust/accel.json",
		MemoryMiB: qemu.DefaultMemoryMiB, CPUs: qemu.DefaultCPUs,
		RuntimeEndpoint: "unix:///run/crust/runtime.sock", Sandboxes: sandbox.DefaultRoot, RootBytes: 1 << 30,
	}
}

// ReadConfig reads a file; empty is the default one. A key that the shim does not know is an error.
func ReadConfig(path string) (Config, error) {
	c := defaults()
	raw, err := os.ReadFile(pathOr(path))
	switch {
	case errors.Is(err, os.ErrNotExist) && path == "":
		return c, nil
	case err != nil:
		return c, fmt.Errorf("configuration: %w", err)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(raw))
	decoder.KnownFields(true)
	if err := decoder.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		return c, fmt.Errorf("configuration %s: %w: %w", pathOr(path), err, errdefs.ErrInvalidArgument)
	}
	if err := c.check(); err != nil {
		return c, fmt.Errorf("configuration %s: %w", pathOr(path), err)
	}
	return c, nil
}

func pathOr(path string) string {
	if path == "" {
		return DefaultConfigPath
	}
	return path
}

func (c Config) check() error {
	for key, dir := range map[string]string{"image": c.Image, "sandboxes": c.Sandboxes, "accelCache": c.AccelCache} {
		if !filepath.IsAbs(dir) {
			return fmt.Errorf("%s %q: want an absolute path: %w", key, dir, errdefs.ErrInvalidArgument)
		}
	}
	if len(c.Sandboxes) > maxSandboxes {
		return fmt.Errorf("sandboxes %q is longer than %d bytes, and sockets in it would have paths that the kernel does not take; choose a shorter one: %w",
			c.Sandboxes, maxSandboxes, errdefs.ErrInvalidArgument)
	}
	if c.RootBytes < 0 {
		return fmt.Errorf("rootBytes %d is negative: %w", c.RootBytes, errdefs.ErrInvalidArgument)
	}
	if _, err := rpc.ParseEndpoint(c.RuntimeEndpoint); err != nil {
		return fmt.Errorf("runtimeEndpoint: %w", err)
	}
	return nil
}
