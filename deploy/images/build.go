package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// config is what is to be built.
type config struct {
	out, name, version, cache string
	arches                    []string
	// programs are the commands of ours in the image, and beside those that are built with them for the nodes themselves: what
	// makes microVMs there.
	programs, beside []string
	// tools are programs of Debian's packages.
	tools []tool
	// log is told what is being done.
	log io.Writer
}

// tool is a Debian package, and the files of it that we want.
type tool struct {
	pkg   string
	files []string
}

// tools are what our programs run, by name or by way of each other.
var tools = []tool{
	{"mount", []string{"/usr/bin/mount", "/usr/bin/umount", "/usr/sbin/losetup"}},
	{"util-linux", []string{"/usr/sbin/blkid", "/usr/sbin/blockdev", "/usr/sbin/fsck", "/usr/bin/findmnt", "/usr/bin/prlimit"}},
	{"e2fsprogs", []string{
		"/usr/sbin/mke2fs", "/usr/sbin/mkfs.ext4", "/usr/sbin/e2fsck", "/usr/sbin/fsck.ext4", "/usr/sbin/resize2fs", "/usr/sbin/dumpe2fs", "/usr/sbin/debugfs",
		"/etc/mke2fs.conf",
	}},
	{"xfsprogs", []string{"/usr/sbin/mkfs.xfs", "/usr/sbin/fsck.xfs", "/usr/sbin/xfs_repair", "/usr/sbin/xfs_db", "/usr/sbin/xfs_io", "/usr/sbin/xfs_growfs"}},
	{"dash", []string{"/usr/bin/sh", "/usr/bin/dash"}}, // fsck.xfs is a script
	{"qemu-utils", []string{"/usr/bin/qemu-img"}},
	{"libgcc-s1", []string{"libgcc_s.so.1"}}, // glibc loads it when a thread is cancelled; nobody is linked to it
	{"base-files", []string{"/usr/lib/os-release", "/etc/os-release"}},
	{"ca-certificates", nil}, // put together by [rootfs.authorities]
}

// triplets are the names of architectures in the paths of libraries.
var triplets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// result is what was built: the digest of the index, and the images by architecture.
type result struct {
	archive string
	index   v1.Hash
	images  map[string]v1.Image
}

// build builds the image for all architectures and writes the archive.
func (c config) build(ctx context.Context) (result, error) {
	work, err := os.MkdirTemp("", "crust-images-")
	if err != nil {
		return result{}, err
	}
	defer os.RemoveAll(work)
	if err := os.MkdirAll(c.out, 0o755); err != nil {
		return result{}, err
	}
	r := result{images: map[string]v1.Image{}}
	bills := map[string][]byte{}
	for _, arch := range c.arches {
		fs, err := c.rootfs(ctx, arch, filepath.Join(work, arch))
		if err != nil {
			return result{}, fmt.Errorf("%s: %w", arch, err)
		}
		if bills[arch], err = c.bill(arch, fs); err != nil {
			return result{}, fmt.Errorf("%s: bill of materials: %w", arch, err)
		}
		c.say("%s: %d files of %d packages", arch, len(fs.files), len(fs.used()))
		if r.images[arch], err = c.image(arch, fs); err != nil {
			return result{}, fmt.Errorf("%s: %w", arch, err)
		}
		for _, program := range c.beside {
			c.say("%s: building %s", arch, program)
			if _, err := c.compile(ctx, arch, program); err != nil {
				return result{}, fmt.Errorf("%s: %w", arch, err)
			}
		}
		if err := os.WriteFile(filepath.Join(c.out, "crust-node-"+arch+".cdx.json"), bills[arch], 0o644); err != nil {
			return result{}, err
		}
	}
	r.archive = filepath.Join(c.out, "crust-node.tar")
	if r.index, err = c.archive(r.archive, filepath.Join(work, "layout"), r.images, bills); err != nil {
		return result{}, err
	}
	c.say("%s: %s@%s", r.archive, c.name, r.index)
	return r, nil
}

func (c config) say(format string, args ...any) { fmt.Fprintf(c.log, "images: "+format+"\n", args...) }

// rootfs puts together the files for an architecture. Work is an empty directory's path.
func (c config) rootfs(ctx context.Context, arch, work string) (*rootfs, error) {
	debs, err := c.download(ctx, arch)
	if err != nil {
		return nil, err
	}
	c.say("%s: unpacking %d packages", arch, len(debs))
	fs, err := unpack(ctx, filepath.Join(work, "debian"), triplets[arch], debs)
	if err != nil {
		return nil, err
	}
	for _, t := range c.tools {
		for _, file := range t.files {
			if err := fs.add(file); err != nil {
				return nil, fmt.Errorf("package %s: %w", t.pkg, err)
			}
		}
	}
	if err := fs.authorities(); err != nil {
		return nil, err
	}
	fs.documents()
	c.say("%s: building %s", arch, strings.Join(c.programs, ", "))
	for _, program := range c.programs {
		path, err := c.compile(ctx, arch, program)
		if err != nil {
			return nil, err
		}
		fs.files["/usr/local/bin/"+program] = entry{path: path, mode: 0o755}
		fs.programs = append(fs.programs, path)
	}
	fs.skeleton()
	return fs, nil
}

// compile builds one of our programs into the directory of its architecture. What the build knows of the repository is left out:
// it would be in the bytes.
func (c config) compile(ctx context.Context, arch, program string) (path string, err error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "crust.dev/crust").Output()
	if err != nil {
		return "", fmt.Errorf("find our sources: %w", err)
	}
	if path, err = filepath.Abs(filepath.Join(c.out, arch, program)); err != nil {
		return "", err
	}
	ldflags := "-s -w -X crust.dev/crust/cmd/internal/command.version=" + c.version + " -X main.version=" + c.version
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", path, "./cmd/"+program)
	cmd.Dir = strings.TrimSpace(string(root))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", program, err, out)
	}
	return path, nil
}
