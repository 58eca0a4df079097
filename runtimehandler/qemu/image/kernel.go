package image

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// Kernel is a kernel and its modules.
type Kernel struct {
	Image   string // the compressed kernel (vmlinuz)
	Modules string // the directory with modules.builtin and kernel/
}

// FindKernel finds the kernel in a directory into which a distribution's kernel package was unpacked: boot/vmlinuz-R with
// lib/modules/R, for any release R. Of several it takes the one whose release sorts last. ErrNotFound if there is none.
func FindKernel(dir string) (Kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil {
		return Kernel{}, fmt.Errorf("find a kernel in %s: %w", dir, err)
	}
	slices.Sort(images)
	for _, image := range slices.Backward(images) {
		release := strings.TrimPrefix(filepath.Base(image), "vmlinuz-")
		for _, lib := range []string{"lib", "usr/lib"} {
			modules := filepath.Join(dir, lib, "modules", release)
			if info, err := os.Stat(modules); err == nil && info.IsDir() {
				return Kernel{Image: image, Modules: modules}, nil
			}
		}
	}
	return Kernel{}, fmt.Errorf("no kernel with its modules in %s; unpack a kernel package there (dpkg-deb -x linux-image-*.deb %s): %w",
		dir, dir, errdefs.ErrNotFound)
}
