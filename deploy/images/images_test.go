package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"crust.dev/crust/test/priv"
)

// needDebian skips where there is no apt-get to get packages with.
func needDebian(t *testing.T) {
	t.Helper()
	priv.Program(t, "apt-get")
	priv.Program(t, "dpkg-deb")
}

// builder builds an image with the tools, and with one program of ours.
func builder(t *testing.T, arches ...string) config {
	t.Helper()
	needDebian(t)
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return config{
		out: t.TempDir(), name: "registry.example.com/crust-node:9", version: "9", cache: filepath.Join(cache, "crust", "images"), arches: arches,
		programs: []string{"crust-csi"}, beside: []string{"crust-agent"}, tools: tools, log: t.Output(),
	}
}

// TestImage builds the image for this architecture twice, and looks at what is in it.
func TestImage(t *testing.T) {
	arch := runtime.GOARCH
	if triplets[arch] == "" {
		t.Skip("images are for amd64 and arm64")
	}
	first := builder(t, arch)
	built, err := first.build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second := builder(t, arch)
	again, err := second.build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Run("the same bytes come out twice", func(t *testing.T) {
		a, b := read(t, built.archive), read(t, again.archive)
		if built.index != again.index || !bytes.Equal(a, b) {
			t.Errorf("%s and %s, %d and %d bytes", built.index, again.index, len(a), len(b))
		}
	})
	t.Run("all programs are beside it", func(t *testing.T) {
		for _, name := range []string{"crust-csi", "crust-agent"} {
			program := read(t, filepath.Join(first.out, arch, name))
			if !bytes.Equal(program, read(t, filepath.Join(second.out, arch, name))) {
				t.Errorf("%s differs", name)
			}
			if _, ok := files(t, built.images[arch])["/usr/local/bin/"+name]; ok != (name == "crust-csi") {
				t.Errorf("%s is in the image: %t", name, ok)
			}
		}
	})
	t.Run("the archive is one of OCI's", func(t *testing.T) { checkArchive(t, built.archive, arch) })
	t.Run("the bill of materials has everything", func(t *testing.T) {
		checkBill(t, read(t, filepath.Join(first.out, "crust-node-"+arch+".cdx.json")), files(t, built.images[arch]))
	})
	t.Run("nothing is of another architecture or without its libraries", func(t *testing.T) { checkFiles(t, arch, files(t, built.images[arch])) })
	t.Run("programs run", func(t *testing.T) { checkPrograms(t, built.images[arch]) })
}

// TestToolsOfTheOtherArchitecture are of that one, and whole.
func TestToolsOfTheOtherArchitecture(t *testing.T) {
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	c := builder(t, other)
	c.programs, c.beside = nil, nil // cross-building ours is the Go compiler's
	built, err := c.build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	checkFiles(t, other, files(t, built.images[other]))
}

// TestArguments that make no sense are refused before anything is done.
func TestArguments(t *testing.T) {
	for want, args := range map[string][]string{
		"--arch s390x":        {"--arch", "s390x"},
		"with a tag":          {"--name", "registry.example.com:5000/crust-node"},
		"crust-node:0":        {"--name", "crust-node:", "--version", "0"},
		"unexpected argument": {"all"},
	} {
		if err := run(t.Context(), append(args, "--output", filepath.Join(t.TempDir(), "none"))); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

type file struct {
	tar.Header
	content []byte
}

// files are those of an image, by absolute name.
func files(t *testing.T, img v1.Image) map[string]file {
	t.Helper()
	list := map[string]file{}
	r := mutate.Extract(img)
	defer r.Close()
	for archive := tar.NewReader(r); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		list["/"+strings.TrimSuffix(h.Name, "/")] = file{*h, content}
	}
}

func checkFiles(t *testing.T, arch string, list map[string]file) {
	t.Helper()
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]
	binaries := 0
	for name, f := range list {
		if f.Uid != 0 || f.Gid != 0 || !f.ModTime.Equal(epoch) {
			t.Errorf("%s is of %d:%d and of %s", name, f.Uid, f.Gid, f.ModTime)
		}
		if f.Mode&0o6000 != 0 {
			t.Errorf("%s changes user or group", name)
		}
		if f.Typeflag == tar.TypeSymlink && !strings.HasPrefix(f.Linkname, "/proc/") {
			target := f.Linkname
			if !path.IsAbs(target) {
				target = path.Join(path.Dir(name), target)
			}
			if _, ok := list[merged(target)]; !ok {
				t.Errorf("%s leads to %s, which is not there", name, target)
			}
		}
		if !bytes.HasPrefix(f.content, []byte(elf.ELFMAG)) {
			continue
		}
		binaries++
		e, err := elf.NewFile(bytes.NewReader(f.content))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if e.Machine != machine {
			t.Errorf("%s is for %s", name, e.Machine)
		}
		libraries, err := e.ImportedLibraries()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, l := range libraries {
			_, there := list["/usr/lib/"+triplets[arch]+"/"+l]
			if _, loader := list["/usr/lib/"+l]; !there && !loader {
				t.Errorf("%s needs %s, which is not there", name, l)
			}
		}
	}
	if binaries < 30 {
		t.Errorf("there are only %d programs and libraries", binaries)
	}
	for _, t2 := range tools {
		for _, name := range t2.files {
			if _, ok := list[name]; !ok && strings.HasPrefix(name, "/") {
				t.Errorf("%s is missing", name)
			}
		}
	}
	if n := bytes.Count(list["/etc/ssl/certs/ca-certificates.crt"].content, []byte("BEGIN CERTIFICATE")); n < 50 {
		t.Errorf("there are %d certificates", n)
	}
	if run := list["/var/run"]; run.Typeflag != tar.TypeDir {
		t.Error("/var/run is no directory")
	}
}

func checkArchive(t *testing.T, archive, arch string) {
	t.Helper()
	dir := t.TempDir()
	unpackTar(t, dir, bytes.NewReader(read(t, archive)))
	p, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	outer, err := p.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(outer); err != nil {
		t.Error(err)
	}
	top, err := outer.IndexManifest()
	if err != nil || len(top.Manifests) != 1 {
		t.Fatalf("%+v, %v", top, err)
	}
	if name := top.Manifests[0].Annotations["io.containerd.image.name"]; name != "registry.example.com/crust-node:9" {
		t.Errorf("containerd would call it %q", name)
	}
	index, err := outer.ImageIndex(top.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	inner, err := index.IndexManifest()
	if err != nil || len(inner.Manifests) != 2 {
		t.Fatalf("%+v, %v", inner, err)
	}
	if pl := inner.Manifests[0].Platform; pl.Architecture != arch || pl.OS != "linux" {
		t.Errorf("the image is for %+v", pl)
	}
	bill, err := index.Image(inner.Manifests[1].Digest)
	if err != nil {
		t.Fatal(err)
	}
	m, err := bill.Manifest()
	if err != nil || m.Subject == nil || m.Subject.Digest != inner.Manifests[0].Digest || m.Config.MediaType != billType {
		t.Errorf("the bill of materials is not that of the image: %+v, %v", m, err)
	}
}

func checkBill(t *testing.T, text []byte, list map[string]file) {
	t.Helper()
	var bom cdx.BOM
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	var purls []string
	for _, c := range *bom.Components {
		purls = append(purls, c.PackageURL)
	}
	for _, want := range []string{"pkg:deb/debian/libc6@", "pkg:deb/debian/xfsprogs@", "pkg:deb/debian/qemu-utils@", "pkg:golang/std@", "pkg:golang/google.golang.org/grpc@"} {
		if !slices.ContainsFunc(purls, func(p string) bool { return strings.HasPrefix(p, want) }) {
			t.Errorf("there is no %s among %v", want, purls)
		}
	}
	packages := 0
	for name := range list {
		pkg, ok := strings.CutPrefix(name, "/var/lib/dpkg/status.d/")
		if !ok {
			continue
		}
		packages++
		if _, ok := list["/usr/share/doc/"+pkg+"/copyright"]; !ok {
			t.Errorf("%s is without its copyright", pkg)
		}
		if !slices.ContainsFunc(purls, func(p string) bool { return strings.HasPrefix(p, "pkg:deb/debian/"+pkg+"@") }) {
			t.Errorf("%s is not in the bill", pkg)
		}
	}
	if debs := len(slices.DeleteFunc(purls, func(p string) bool { return !strings.HasPrefix(p, "pkg:deb/") })); debs != packages {
		t.Errorf("%d packages in the image, %d in the bill", packages, debs)
	}
	if slices.ContainsFunc(purls, func(p string) bool { return strings.Contains(p, "python") }) {
		t.Error("what xfsprogs only recommends to have, python, has got in")
	}
}

// checkPrograms runs what is in the image, in nothing but the image.
func checkPrograms(t *testing.T, img v1.Image) {
	priv.Root(t)
	root := t.TempDir()
	unpackTar(t, root, mutate.Extract(img))
	for _, argv := range [][]string{
		{"/usr/local/bin/crust-csi", "--version"}, {"/usr/bin/mount", "--version"}, {"/usr/bin/umount", "--version"}, {"/usr/sbin/losetup", "--version"},
		{"/usr/sbin/blkid", "--version"}, {"/usr/sbin/blockdev", "--version"}, {"/usr/sbin/fsck", "--version"}, {"/usr/bin/findmnt", "--version"}, {"/usr/bin/prlimit", "--version"},
		{"/usr/sbin/mkfs.ext4", "-V"}, {"/usr/sbin/e2fsck", "-V"}, {"/usr/sbin/fsck.ext4", "-V"}, {"/usr/sbin/dumpe2fs", "-V"}, {"/usr/sbin/debugfs", "-V"},
		{"/usr/sbin/mkfs.xfs", "-V"}, {"/usr/sbin/xfs_repair", "-V"}, {"/usr/sbin/xfs_db", "-V"}, {"/usr/sbin/xfs_io", "-V"}, {"/usr/sbin/xfs_growfs", "-V"},
		{"/usr/bin/qemu-img", "--version"}, {"/usr/bin/sh", "-c", "exit 0"},
		// Not only that they start: a filesystem is made and measured, and an image converted.
		{"/usr/bin/qemu-img", "create", "-q", "-f", "raw", "/tmp/disk", "400M"}, {"/usr/sbin/mkfs.xfs", "-q", "/tmp/disk"}, {"/usr/sbin/xfs_repair", "-n", "/tmp/disk"},
		{"/usr/sbin/blkid", "-p", "/tmp/disk"}, {"/usr/sbin/mkfs.ext4", "-q", "-F", "/tmp/disk"}, {"/usr/sbin/resize2fs", "/tmp/disk"}, {"/usr/sbin/e2fsck", "-fn", "/tmp/disk"},
		{"/usr/bin/qemu-img", "convert", "-O", "qcow2", "/tmp/disk", "/tmp/disk.qcow2"},
	} {
		cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin", "LC_ALL=C", "EXT2FS_NO_MTAB_OK=1"} // /proc is not mounted
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %v: %s", argv, err, out)
		}
	}
}

func unpackTar(t *testing.T, root string, content io.Reader) {
	t.Helper()
	for archive := tar.NewReader(content); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(root, h.Name)
		if err = os.MkdirAll(filepath.Dir(name), 0o755); err == nil {
			switch h.Typeflag {
			case tar.TypeDir:
				err = os.MkdirAll(name, h.FileInfo().Mode().Perm())
			case tar.TypeSymlink:
				err = os.Symlink(h.Linkname, name)
			default:
				if err = writeFile(name, archive); err == nil {
					err = os.Chmod(name, h.FileInfo().Mode().Perm())
				}
			}
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
}
