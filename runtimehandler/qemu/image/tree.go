package image

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"

	"github.com/cavaliergopher/cpio"
	"github.com/containerd/errdefs"
)

// entry is one file of an image. A regular file has a source or data, a symbolic link has its target as data.
type entry struct {
	mode   fs.FileMode
	source string
	data   []byte
}

// tree is the content of an image by absolute path.
type tree map[string]entry

func (t tree) directory(name string, perm fs.FileMode) {
	if name == "/" {
		return
	}
	if _, ok := t[name]; ok {
		return
	}
	t.directory(path.Dir(name), 0o755)
	t[name] = entry{mode: fs.ModeDir | perm}
}

func (t tree) link(name, target string) {
	t.directory(path.Dir(name), 0o755)
	t[name] = entry{mode: fs.ModeSymlink | 0o777, data: []byte(target)}
}

func (t tree) file(name string, data []byte) {
	t.directory(path.Dir(name), 0o755)
	t[name] = entry{mode: 0o644, data: data}
}

func (t tree) copy(name, source string, perm fs.FileMode) {
	t.directory(path.Dir(name), 0o755)
	t[name] = entry{mode: perm.Perm(), source: source}
}

// content returns the bytes of an entry.
func (e entry) content() ([]byte, error) {
	if e.source == "" {
		return e.data, nil
	}
	return os.ReadFile(e.source)
}

// write writes the tree as a cpio archive of the format "newc" (the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst), sorted, without times or owners.
func (t tree) write(w io.Writer) error {
	archive := cpio.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(t)) { // a directory sorts before what is in it
		e := t[name]
		content, err := e.content()
		if err != nil {
			return fmt.Errorf("guest image: %w", err)
		}
		mode, err := cpioMode(e.mode)
		if err != nil {
			return fmt.Errorf("guest image: %s: %w", name, err)
		}
		if err := archive.WriteHeader(&cpio.Header{Name: name[1:], Mode: mode, Size: int64(len(content)), Links: 1}); err != nil {
			return fmt.Errorf("guest image: %w", err)
		}
		if _, err := archive.Write(content); err != nil {
			return fmt.Errorf("guest image: %w", err)
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("guest image: %w", err)
	}
	return nil
}

func cpioMode(mode fs.FileMode) (cpio.FileMode, error) {
	perm := cpio.FileMode(mode.Perm())
	switch mode.Type() {
	case 0:
		return cpio.TypeReg | perm, nil
	case fs.ModeDir:
		if mode&fs.ModeSticky != 0 {
			perm |= cpio.ModeSticky
		}
		return cpio.TypeDir | perm, nil
	case fs.ModeSymlink:
		return cpio.TypeSymlink | perm, nil
	}
	return 0, fmt.Errorf("mode %v: %w", mode, errdefs.ErrInvalidArgument)
}

// digest is over everything that is in the tree.
func (t tree) digest() (string, error) {
	h := sha256.New()
	if err := t.write(h); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
