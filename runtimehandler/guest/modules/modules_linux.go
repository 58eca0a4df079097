// Package modules loads kernel modules by lists that whoever made the guest's image has put in order: there is no depmod
// and no modprobe in the guest.
package modules

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Dir is a directory with lists of modules. A list has the absolute path of a module per line, each after what it depends
// on; a "-" before it says that the module may not fit the machine, and the guest does without. An empty Dir, or a list
// that is not there, is a kernel that needs no modules.
type Dir string

// LoadForBoot loads what the guest needs to come up.
func (d Dir) LoadForBoot() error { return d.load("boot") }

// LoadForFilesystem loads what the kernel needs for a type of filesystem. It is left until the first mount, because to
// load XFS takes as long as a quarter of the boot where instructions are translated.
func (d Dir) LoadForFilesystem(fsType string) error { return d.load("fs-" + fsType) }

// HasFilesystem says whether there are modules for a type of filesystem.
func (d Dir) HasFilesystem(fsType string) bool {
	if d == "" {
		return false
	}
	_, err := os.Stat(filepath.Join(string(d), "fs-"+fsType))
	return err == nil
}

func (d Dir) load(list string) error {
	if d == "" {
		return nil
	}
	content, err := os.ReadFile(filepath.Join(string(d), list))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list of modules: %w", err)
	}
	modules, err := parse(string(content))
	if err != nil {
		return fmt.Errorf("list of modules %s: %w", list, err)
	}
	for _, m := range modules {
		if err := loadFile(m.path); err != nil && !m.optional {
			return fmt.Errorf("load module %s: %w", m.path, err)
		}
	}
	return nil
}

// module is a line of a list.
type module struct {
	path     string
	optional bool
}

func parse(list string) ([]module, error) {
	var modules []module
	for lines := bufio.NewScanner(strings.NewReader(list)); lines.Scan(); {
		path, optional := strings.CutPrefix(lines.Text(), "-")
		if path == "" && !optional {
			continue
		}
		if !filepath.IsAbs(path) {
			return nil, fmt.Errorf("%q is not an absolute path", lines.Text())
		}
		modules = append(modules, module{path: path, optional: optional})
	}
	return modules, nil
}

// loadFile loads one module; one that is loaded already is success.
func loadFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("finit_module: %w", err)
	}
	return nil
}
