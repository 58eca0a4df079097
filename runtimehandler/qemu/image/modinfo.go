package image

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
)

// readModule returns a kernel module, decompressed.
func readModule(path string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("kernel module: %w", err)
	}
	switch ext := filepath.Ext(path); ext {
	case ".ko":
		return raw, nil
	case ".gz":
		zr, err := gzip.NewReader(bytes.NewReader(raw))
		if err != nil {
			return nil, fmt.Errorf("kernel module %s: %w", path, err)
		}
		raw, err = io.ReadAll(zr)
		if err != nil {
			return nil, fmt.Errorf("kernel module %s: %w", path, err)
		}
		return raw, nil
	default:
		return nil, fmt.Errorf("kernel module %s is compressed as %s, which is not supported; decompress the directory (find -name '*%s' with unxz or unzstd), or use a kernel with plain modules, such as Debian's linux-image-cloud-amd64: %w",
			path, ext, ext, errdefs.ErrNotImplemented)
	}
}

// moduleInfo returns the lines of a module's .modinfo section, "key=value", by key.
func moduleInfo(module []byte) (map[string][]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo section: %w", errdefs.ErrInvalidArgument)
	}
	data, err := section.Data()
	if err != nil {
		return nil, err
	}
	info := map[string][]string{}
	for line := range strings.SplitSeq(string(data), "\x00") {
		if key, value, ok := strings.Cut(line, "="); ok {
			info[key] = append(info[key], value)
		}
	}
	return info, nil
}

// dependencies returns what has to be loaded before a module: what it cannot do without, and what it would like to have.
func dependencies(info map[string][]string) (needs, likes []string) {
	for _, list := range info["depends"] {
		for name := range strings.SplitSeq(list, ",") {
			if name != "" {
				needs = append(needs, moduleName(name))
			}
		}
	}
	for _, list := range info["softdep"] {
		before := false
		for word := range strings.FieldsSeq(list) {
			switch word {
			case "pre:":
				before = true
			case "post:", "platform:":
				before = false
			default:
				if before {
					likes = append(likes, moduleName(word))
				}
			}
		}
	}
	return needs, likes
}

// moduleName returns the kernel's name of a module, which never has a hyphen (modules.builtin, modinfo and file names
// disagree about that).
func moduleName(name string) string {
	base, _, _ := strings.Cut(filepath.Base(name), ".ko")
	return strings.ReplaceAll(base, "-", "_")
}
