package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
)

// want is a module for the guest.
type want struct {
	name     string
	optional bool // the guest works without it, or has no use for it on some machines
}

// lists are the modules for the guest by the list that they are in. The agent's line to the host comes first, and the
// faster implementation of a checksum before the filesystems, which take what is there when they are mounted.
var lists = []struct {
	name  string
	wants []want
}{
	{"boot", []want{
		{"virtio_pci", false},
		{"virtio_console", false},
		{"virtio_blk", false},
		{"crc32c_intel", true},
		{"virtio_rng", true},
		{"vmw_vsock_virtio_transport", true},
		{"vsock_loopback", true},
	}},
	{"fs-ext4", []want{{"ext4", false}}},
	{"fs-xfs", []want{{"xfs", false}}},
}

// module is a module to load.
type module struct {
	name     string
	content  []byte
	optional bool
}

// moduleIndex knows the modules of a kernel.
type moduleIndex struct {
	dir     string
	files   map[string]string // by name
	builtin map[string]bool   // by name or alias
}

// indexModules reads which modules there are and which are built in. It does without modules.dep, because packages do
// not ship it: depmod makes it at installation.
func indexModules(dir string) (*moduleIndex, error) {
	idx := &moduleIndex{dir: dir, files: map[string]string{}, builtin: map[string]bool{}}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("kernel modules: %w", err)
	}
	for path := range strings.FieldsSeq(string(list)) {
		idx.builtin[moduleName(path)] = true
	}
	aliases, err := os.ReadFile(filepath.Join(dir, "modules.builtin.modinfo"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // kernels before 5.2 have none
		return nil, fmt.Errorf("kernel modules: %w", err)
	}
	for line := range strings.SplitSeq(string(aliases), "\x00") {
		if _, alias, ok := strings.Cut(line, ".alias="); ok {
			idx.builtin[moduleName(alias)] = true
		}
	}
	err = filepath.WalkDir(filepath.Join(dir, "kernel"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(d.Name(), ".ko") {
			idx.files[moduleName(d.Name())] = path
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("kernel modules: %w", err)
	}
	return idx, nil
}

// resolve returns the wanted modules and all that they depend on, each after its dependencies. What is built into the
// kernel is left out.
func (idx *moduleIndex) resolve(wanted []want) ([]module, error) {
	r := resolver{moduleIndex: idx, at: map[string]int{}}
	for _, w := range wanted {
		err := r.add(w.name, w.optional)
		if err != nil && !(w.optional && errors.Is(err, errdefs.ErrNotFound)) {
			return nil, fmt.Errorf("guest image: kernel in %s: %w", idx.dir, err)
		}
	}
	return r.list, nil
}

type resolver struct {
	*moduleIndex
	list []module
	at   map[string]int // index in list, or visiting
}

const visiting = -1

// add appends a module after its dependencies. One that is needed makes what it needs needed.
func (r *resolver) add(name string, optional bool) error {
	if i, ok := r.at[name]; ok {
		if i == visiting {
			return fmt.Errorf("module %s depends on itself: %w", name, errdefs.ErrInvalidArgument)
		}
		if !r.list[i].optional || optional {
			return nil
		}
	}
	if r.builtin[name] {
		return nil
	}
	path, ok := r.files[name]
	if !ok {
		return fmt.Errorf("module %s is neither built in nor among the modules: %w", name, errdefs.ErrNotFound)
	}
	content, err := readModule(path)
	if err != nil {
		return err
	}
	info, err := moduleInfo(content)
	if err != nil {
		return fmt.Errorf("module %s: %w", path, err)
	}
	known, had := r.at[name]
	r.at[name] = visiting
	needs, likes := dependencies(info)
	for _, dep := range needs {
		if err := r.add(dep, optional); err != nil {
			return fmt.Errorf("%s needs %w", name, err)
		}
	}
	for _, dep := range likes {
		if err := r.add(dep, true); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return fmt.Errorf("%s likes %w", name, err)
		}
	}
	if had { // it was optional until now; its place in the order is as good
		r.at[name] = known
		r.list[known].optional = false
		return nil
	}
	r.at[name] = len(r.list)
	r.list = append(r.list, module{name: name, content: content, optional: optional})
	return nil
}
