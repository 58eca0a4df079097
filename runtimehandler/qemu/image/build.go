package image

import (
	"context"
	"io"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Build writes the initramfs.
func Build(ctx context.Context, c Config, w io.Writer) error {
	t, err := plan(ctx, c)
	if err != nil {
		return err
	}
	return t.write(w)
}

// Key is a digest over everything that goes into an image, the kernel apart, which is used where it is.
func Key(ctx context.Context, c Config) (string, error) {
	t, err := plan(ctx, c)
	if err != nil {
		return "", err
	}
	return t.digest()
}

// plan finds everything that goes into an image.
func plan(ctx context.Context, c Config) (tree, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	t := skeleton()
	t.copy(agentPath, c.Agent, 0o755)
	t.link("/init", agentPath)
	if err := addModules(t, c.Kernel.Modules); err != nil {
		return nil, err
	}
	libs, err := newLibraries(c.root())
	if err != nil {
		return nil, err
	}
	for _, list := range tools {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for _, name := range list.names {
			source, err := findTool(c.root(), name, list.pkg)
			if err != nil {
				return nil, err
			}
			t.copy(path.Join("/usr", toolDir(source), name), source, 0o755)
			if err := libs.add(source); err != nil {
				return nil, err
			}
		}
	}
	for _, f := range c.Extra {
		t.copy(f.Path, f.Source, f.Mode)
		if err := libs.add(f.Source); err != nil {
			return nil, err
		}
	}
	for _, soname := range slices.Sorted(maps.Keys(libs.found)) {
		t.copy(path.Join("/usr/lib", soname), libs.found[soname], 0o755)
	}
	return t, nil
}

// toolDir is "bin" or "sbin".
func toolDir(source string) string { return filepath.Base(filepath.Dir(source)) }

// skeleton is what every root filesystem has. All directories for libraries are one, so that the loader finds them
// without a cache whatever its built-in search path is.
func skeleton() tree {
	t := tree{}
	for _, dir := range []string{"/dev", "/etc", "/mnt", "/proc", "/root", "/run", "/sys", "/usr/bin", "/usr/lib", "/usr/sbin", "/var/tmp"} {
		t.directory(dir, 0o755)
	}
	t.directory("/tmp", 0o777|fs.ModeSticky)
	for name, target := range map[string]string{
		"/bin":                      "usr/bin",
		"/sbin":                     "usr/sbin",
		"/lib":                      "usr/lib",
		"/lib64":                    "usr/lib",
		"/usr/lib64":                "lib",
		"/usr/lib/x86_64-linux-gnu": ".",
		"/var/run":                  "../run",
		"/etc/mtab":                 "../proc/self/mounts",
	} {
		t.link(name, target)
	}
	t.file("/etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"))
	t.file("/etc/group", []byte("root:x:0:\nnogroup:x:65534:\n"))
	return t
}

// addModules adds the modules and their lists. A list in which everything is built into the kernel is there and empty: the
// guest can tell from it that it has the filesystem.
func addModules(t tree, dir string) error {
	idx, err := indexModules(dir)
	if err != nil {
		return err
	}
	for _, list := range lists {
		modules, err := idx.resolve(list.wants)
		if err != nil {
			return err
		}
		var order strings.Builder
		for _, m := range modules {
			name := path.Join(ModuleDir, m.name+".ko")
			t.file(name, m.content)
			if m.optional {
				order.WriteByte('-')
			}
			order.WriteString(name + "\n")
		}
		t.file(path.Join(ModuleDir, list.name), []byte(order.String()))
	}
	return nil
}
