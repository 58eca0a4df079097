package image

import (
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/containerd/errdefs"
)

// ModuleDir is the directory in the image with the kernel modules and lists of them: "boot" has what the guest needs to
// come up, "fs-" with a type what it needs to mount a filesystem of that. A list has one absolute path per line, each after
// what it depends on, and after a "-" if the guest does without it where it does not fit the machine.
const ModuleDir = "/usr/lib/crust/modules"

// agentPath is where the agent is in the image; /init is a link to it.
const agentPath = "/usr/sbin/crust-agent"

// Config is what an image is made of.
type Config struct {
	// Agent is a crust-agent, statically linked.
	Agent string
	// Kernel is where the kernel and its modules are.
	Kernel Kernel
	// Root is where tools and libraries are taken from; empty is "/".
	Root string
	// Extra are more files, for tests.
	Extra []File
}

// File is a file to put into an image.
type File struct {
	Path   string      // in the image, absolute and clean
	Source string      // what to copy
	Mode   fs.FileMode // permissions
}

func (c Config) validate() error {
	for _, p := range []struct{ what, path string }{
		{"agent", c.Agent}, {"kernel", c.Kernel.Image}, {"modules", c.Kernel.Modules},
	} {
		if !filepath.IsAbs(p.path) {
			return fmt.Errorf("guest image: path %q of the %s is not absolute: %w", p.path, p.what, errdefs.ErrInvalidArgument)
		}
	}
	for _, f := range c.Extra {
		if !filepath.IsAbs(f.Path) || filepath.Clean(f.Path) != f.Path || f.Path == "/" {
			return fmt.Errorf("guest image: path %q of an extra file is not absolute and clean: %w", f.Path, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

func (c Config) root() string {
	if c.Root == "" {
		return "/"
	}
	return c.Root
}
