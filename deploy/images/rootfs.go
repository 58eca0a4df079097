package main

import (
	"archive/tar"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// entry is a file of the image: what is at path here, or data, or a symbolic link, or a directory.
type entry struct {
	path string
	data []byte
	link string
	dir  bool
	mode fs.FileMode
}

// rootfs is what is put into an image. Names in it are absolute, with /bin, /sbin and /lib beneath /usr.
type rootfs struct {
	dir     string // what Debian's packages have, unpacked
	triplet string
	debs    []deb
	owner   map[string]string // package by file
	links   map[string]string // symbolic links of packages
	regular map[string]fs.FileMode

	files    map[string]entry
	programs []string // ours, where they were built
}

// merged is a path of a package as it is since /bin, /sbin and /lib are in /usr.
func merged(name string) string {
	name = path.Clean("/" + name)
	for _, dir := range []string{"/bin", "/sbin", "/lib", "/lib64"} {
		if name == dir || strings.HasPrefix(name, dir+"/") {
			return "/usr" + name
		}
	}
	return name
}

// unpack unpacks packages into dir.
func unpack(ctx context.Context, dir, triplet string, debs []deb) (*rootfs, error) {
	r := &rootfs{dir: dir, triplet: triplet, debs: debs, owner: map[string]string{}, links: map[string]string{}, regular: map[string]fs.FileMode{}, files: map[string]entry{}}
	for _, d := range debs {
		cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", d.path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("unpack %s: %w", d.name, err)
		}
		err = r.extract(tar.NewReader(out), d.name)
		_, _ = io.Copy(io.Discard, out) // or else it would wait for a reader
		if err := errors.Join(err, cmd.Wait()); err != nil {
			return nil, fmt.Errorf("unpack %s: %w", d.name, err)
		}
	}
	return r, nil
}

func (r *rootfs) extract(t *tar.Reader, pkg string) error {
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := merged(h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			continue // many packages have the same
		case tar.TypeReg:
			err = writeFile(filepath.Join(r.dir, name), t)
			r.regular[name] = h.FileInfo().Mode().Perm()
		case tar.TypeSymlink:
			r.links[name] = h.Linkname
		case tar.TypeLink:
			// Another name of the same file; it comes after it.
			target := merged(h.Linkname)
			err = os.MkdirAll(filepath.Dir(filepath.Join(r.dir, name)), 0o755)
			if err == nil {
				err = os.Link(filepath.Join(r.dir, target), filepath.Join(r.dir, name))
			}
			r.regular[name] = r.regular[target]
		}
		if err != nil {
			return err
		}
		r.owner[name] = pkg
	}
}

func writeFile(name string, content io.Reader) (err error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.Copy(f, content)
	return err
}

// add puts a file of a package into the image, with what it leads to and what it is linked to. A name without a slash is a
// library's.
func (r *rootfs) add(name string) error {
	if !strings.Contains(name, "/") {
		return r.library(name)
	}
	for range 10 {
		name = merged(name)
		if _, done := r.files[name]; done {
			return nil
		}
		if mode, ok := r.regular[name]; ok {
			r.files[name] = entry{path: filepath.Join(r.dir, name), mode: mode}
			return r.needed(name)
		}
		target, ok := r.links[name]
		if !ok {
			return fmt.Errorf("%s is in none of the packages; Debian may have moved it: %w", name, fs.ErrNotExist)
		}
		r.files[name] = entry{link: target, mode: 0o777}
		if !path.IsAbs(target) {
			target = path.Join(path.Dir(name), target)
		}
		name = target
	}
	return fmt.Errorf("%s: too many symbolic links", name)
}

// needed adds what a program or library is linked to.
func (r *rootfs) needed(name string) error {
	f, err := elf.Open(filepath.Join(r.dir, name))
	var format *elf.FormatError
	if errors.As(err, &format) || errors.Is(err, io.EOF) {
		return nil // a script, or data
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		text, err := io.ReadAll(p.Open())
		if err != nil {
			return err
		}
		if err := r.add(strings.TrimRight(string(text), "\x00")); err != nil {
			return fmt.Errorf("the loader of %s: %w", name, err)
		}
	}
	libraries, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, l := range libraries {
		if err := r.library(l); err != nil {
			return fmt.Errorf("a library of %s: %w", name, err)
		}
	}
	return nil
}

func (r *rootfs) library(name string) error {
	for _, dir := range []string{"/usr/lib/" + r.triplet, "/usr/lib", "/usr/lib64"} {
		full := path.Join(dir, name)
		if _, ok := r.owner[full]; ok {
			return r.add(full)
		}
	}
	return fmt.Errorf("%s is in none of the packages: %w", name, fs.ErrNotExist)
}

// authorities puts the certificates that Debian believes into one file, as ca-certificates does when it is installed. They are
// for downloads of backing images.
func (r *rootfs) authorities() error {
	const from = "/usr/share/ca-certificates/"
	var bundle []byte
	for _, name := range r.sorted() {
		if !strings.HasPrefix(name, from) || path.Ext(name) != ".crt" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(r.dir, name))
		if err != nil {
			return err
		}
		bundle = append(bundle, text...)
		if !strings.HasSuffix(string(text), "\n") {
			bundle = append(bundle, '\n')
		}
	}
	if len(bundle) == 0 {
		return fmt.Errorf("there are no certificates in %s: %w", from, fs.ErrNotExist)
	}
	const bundled = "/etc/ssl/certs/ca-certificates.crt"
	r.files[bundled] = entry{data: bundle, mode: 0o644}
	r.owner[bundled] = "ca-certificates"
	return nil
}

// sorted are the names of all regular files of packages.
func (r *rootfs) sorted() []string {
	var names []string
	for name := range r.regular {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// used are the packages that files of the image are from.
func (r *rootfs) used() (list []deb) {
	for _, d := range r.debs {
		for name := range r.files {
			if r.owner[name] == d.name {
				list = append(list, d)
				break
			}
		}
	}
	return list
}

// documents adds the copyright of each package that is used, and its entry for dpkg where scanners of images look for it.
func (r *rootfs) documents() {
	for _, d := range r.used() {
		name := "/usr/share/doc/" + d.name + "/copyright"
		from := name
		if target, ok := r.links[path.Dir(name)]; ok { // packages of one source share theirs
			from = path.Join("/usr/share/doc", target, "copyright")
		}
		if target, ok := r.links[from]; ok {
			from = path.Join(path.Dir(from), target)
		}
		if _, ok := r.regular[from]; ok {
			r.files[name] = entry{path: filepath.Join(r.dir, from), mode: 0o644}
			r.owner[name] = d.name
		}
		r.files["/var/lib/dpkg/status.d/"+d.name] = entry{data: d.control, mode: 0o644}
	}
}

// skeleton adds what is in every root file system, and the directories of all files.
func (r *rootfs) skeleton() {
	for name, link := range map[string]string{"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64", "/etc/mtab": "/proc/self/mounts"} {
		r.files[name] = entry{link: link, mode: 0o777}
	}
	for name, text := range map[string]string{
		"/etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
		"/etc/group":  "root:x:0:\nnogroup:x:65534:\n",
	} {
		r.files[name] = entry{data: []byte(text), mode: 0o644}
	}
	// /var/run is no link to /run: the kubelet mounts tokens beneath the former, and the node's /run may be on the latter.
	for _, name := range []string{"/dev", "/proc", "/sys", "/run", "/var/run", "/root", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64"} {
		r.files[name] = entry{dir: true, mode: 0o755}
	}
	r.files["/tmp"] = entry{dir: true, mode: 0o777 | fs.ModeSticky}
	var all []string
	for name := range r.files {
		all = append(all, name)
	}
	for _, name := range all {
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			if _, ok := r.files[dir]; !ok {
				r.files[dir] = entry{dir: true, mode: 0o755}
			}
		}
	}
}
