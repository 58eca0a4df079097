package image_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu/image"
	"crust.dev/crust/test/vm"
)

// config is for an image of what this machine has.
func config(t *testing.T) image.Config {
	t.Helper()
	vm.Need(t)
	agent := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(agent, []byte("agent"), 0o755); err != nil {
		t.Fatal(err)
	}
	kernel, err := image.FindKernel(vm.KernelDir())
	if err != nil {
		t.Fatal(err)
	}
	return image.Config{Agent: agent, Kernel: kernel}
}

// files returns what is in an archive.
func files(t *testing.T, r io.Reader) (names []string, contents map[string]string) {
	t.Helper()
	contents = map[string]string{}
	for archive := cpio.NewReader(r); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return names, contents
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.IsZero() && h.ModTime.Unix() != 0 || h.Uid != 0 || h.Guid != 0 {
			t.Errorf("%s has time %v, owner %d:%d", h.Name, h.ModTime, h.Uid, h.Guid)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
		contents[h.Name] = string(content) + h.Linkname
	}
}

func TestBuild(t *testing.T) {
	c := config(t)
	var first, second bytes.Buffer
	for _, b := range []*bytes.Buffer{&first, &second} {
		if err := image.Build(t.Context(), c, b); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same inputs have given other bytes")
	}
	names, contents := files(t, &first)
	if !slices.IsSorted(names) {
		t.Error("the files are not sorted")
	}
	for _, name := range []string{"usr/sbin/crust-agent", "usr/sbin/mkfs.ext4", "usr/sbin/blkid", "usr/bin/sh", "usr/lib/libc.so.6", "usr/lib/ld-linux-x86-64.so.2"} {
		if contents[name] == "" {
			t.Errorf("there is no %s", name)
		}
	}
	if contents["init"] != "/usr/sbin/crust-agent" || contents["usr/sbin/crust-agent"] != "agent" {
		t.Error("the first program is not the agent")
	}
	for _, list := range []string{"boot", "fs-ext4", "fs-xfs"} {
		order, ok := contents[strings.TrimPrefix(image.ModuleDir, "/")+"/"+list]
		if !ok {
			t.Errorf("there is no list %s", list)
		}
		for path := range strings.FieldsSeq(order) {
			if contents[strings.TrimPrefix(strings.TrimPrefix(path, "-"), "/")] == "" {
				t.Errorf("list %s has %s, which is not there", list, path)
			}
		}
	}
	for _, name := range names { // every file's directory comes before it
		if dir := filepath.Dir(name); dir != "." && !slices.Contains(names, dir) {
			t.Errorf("%s has no directory", name)
		}
	}
}

func TestEnsure(t *testing.T) {
	c := config(t)
	dir := filepath.Join(t.TempDir(), "cache")
	ensure := func() string {
		t.Helper()
		got, err := image.Ensure(t.Context(), c, dir)
		if err != nil {
			t.Fatal(err)
		}
		if got.Kernel != c.Kernel.Image {
			t.Errorf("kernel %s", got.Kernel)
		}
		return got.Initrd
	}
	first := ensure()
	info, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	if again := ensure(); again != first {
		t.Errorf("%s, then %s", first, again)
	}
	if now, err := os.Stat(first); err != nil || !os.SameFile(info, now) {
		t.Errorf("it was made again: %v", err)
	}
	if err := os.WriteFile(c.Agent, []byte("another"), 0o755); err != nil {
		t.Fatal(err)
	}
	if other := ensure(); other == first {
		t.Error("another agent, and the same image")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("the cache has %v, %v", entries, err)
	}
	key, err := image.Key(t.Context(), c)
	if err != nil || len(key) != 64 {
		t.Errorf("key %q, %v", key, err)
	}
}

func TestExtraFiles(t *testing.T) {
	c := config(t)
	c.Extra = []image.File{{Path: "/opt/deep/tool", Source: "/bin/true", Mode: 0o755}}
	var b bytes.Buffer
	if err := image.Build(t.Context(), c, &b); err != nil {
		t.Fatal(err)
	}
	if _, contents := files(t, &b); contents["opt/deep/tool"] == "" {
		t.Error("the file is missing")
	}
	for _, path := range []string{"opt/x", "/opt/../x", "/"} {
		c.Extra[0].Path = path
		if err := image.Build(t.Context(), c, io.Discard); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%q: %v", path, err)
		}
	}
}

func TestMissingThings(t *testing.T) {
	c := config(t)
	whole := c
	c.Root = t.TempDir()
	if err := image.Build(t.Context(), c, io.Discard); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), "apt-get install e2fsprogs") {
		t.Errorf("without any tool: %v", err)
	}
	bin := filepath.Join(c.Root, "usr/sbin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	tool, err := os.ReadFile("/usr/sbin/mke2fs")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bin, "mkfs.ext4"), tool, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := image.Build(t.Context(), c, io.Discard); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), "libext2fs.so.2") {
		t.Errorf("without libraries: %v", err)
	}
	for name, change := range map[string]func(*image.Config){
		"a relative agent": func(c *image.Config) { c.Agent = "agent" },
		"no kernel":        func(c *image.Config) { c.Kernel = image.Kernel{} },
	} {
		c := whole
		change(&c)
		if err := image.Build(t.Context(), c, io.Discard); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c = whole
	c.Agent = "/no/such/agent"
	if err := image.Build(t.Context(), c, io.Discard); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without an agent: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := image.Build(ctx, whole, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("when nobody wants it any more: %v", err)
	}
}

func TestFindKernel(t *testing.T) {
	dir := t.TempDir()
	if _, err := image.FindKernel(dir); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), "dpkg-deb") {
		t.Errorf("in an empty directory: %v", err)
	}
	for _, path := range []string{"boot/vmlinuz-6.1.0-9", "boot/vmlinuz-6.1.0-10", "lib/modules/6.1.0-9/x", "usr/lib/modules/6.1.0-8/x"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	k, err := image.FindKernel(dir)
	if err != nil || k.Image != filepath.Join(dir, "boot/vmlinuz-6.1.0-9") || k.Modules != filepath.Join(dir, "lib/modules/6.1.0-9") {
		t.Errorf("%+v, %v", k, err)
	}
}
