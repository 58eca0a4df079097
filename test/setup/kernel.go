package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// metaPackage depends on the newest kernel of the distribution that is built for virtual machines.
const metaPackage = "linux-image-cloud-amd64"

// dependsCommand prints the name of the package with the kernel itself.
const dependsCommand = "apt-cache depends " + metaPackage + " | awk '/Depends: linux-image/{print $2}'"

// kernelDir is where the kernel is unpacked; it is not installed, because it is for guests.
func kernelDir() (string, error) {
	if dir := os.Getenv("CRUST_KERNEL_DIR"); dir != "" {
		return dir, nil
	}
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		cache = "/var/cache"
	}
	if !filepath.IsAbs(cache) {
		return "", fmt.Errorf("XDG_CACHE_HOME %q is not an absolute path", cache)
	}
	return filepath.Join(cache, "crust", "kernel"), nil
}

func hasKernel(dir string) bool {
	found, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	return err == nil && len(found) > 0
}

// unpackKernel downloads the kernel package and unpacks it, whole or not at all.
func unpackKernel(ctx context.Context, dir string) (err error) {
	pkg, err := kernelPackage(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("setup: unpacking %s to %s\n", pkg, dir)
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".kernel-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	// apt's unprivileged user may not write to a directory of root's.
	if err := command(ctx, tmp, "apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", pkg); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download %s has left %v, %w", pkg, debs, err)
	}
	unpacked := filepath.Join(tmp, "unpacked")
	if err := command(ctx, tmp, "dpkg-deb", "-x", debs[0], unpacked); err != nil {
		return err
	}
	if err := os.Rename(unpacked, dir); err != nil {
		return fmt.Errorf("%w; if %s has something else in it, move that away", err, dir)
	}
	return nil
}

func kernelPackage(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "apt-cache", "depends", metaPackage)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("apt-cache depends %s: %w", metaPackage, err)
	}
	for line := range strings.Lines(string(out)) {
		if pkg, ok := strings.CutPrefix(strings.TrimSpace(line), "Depends: linux-image-"); ok {
			return "linux-image-" + pkg, nil
		}
	}
	return "", fmt.Errorf("apt knows no kernel behind %s; is this Debian on amd64?", metaPackage)
}
