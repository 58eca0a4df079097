package config

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/BurntSushi/toml"
	securejoin "github.com/cyphar/filepath-securejoin"
)

// Runtime is one of Kata's two runtimes.
type Runtime string

// The runtimes.
const (
	Go   Runtime = "go"   // containerd-shim-kata-v2 in Go, deprecated since Kata 4.0
	Rust Runtime = "rust" // runtime-rs, the default since Kata 4.0
)

// patterns are where the runtimes look by default, and where Kata's packages and kata-deploy put their files; also those
// of an installation with a suffix (/opt/kata-SUFFIX).
var patterns = []string{
	"/etc/kata-containers/*.toml",
	"/etc/kata-containers/runtime-rs/*.toml",
	"/usr/share/defaults/kata-containers/*.toml",
	"/usr/share/defaults/kata-containers/runtime-rs/*.toml",
	"/opt/kata*/share/defaults/kata-containers/*.toml",
	"/opt/kata*/share/defaults/kata-containers/runtime-rs/*.toml",
	"/opt/kata*/share/defaults/kata-containers/*runtimes/*/*.toml",
	"/opt/kata*/share/defaults/kata-containers/runtime-rs/*runtimes/*/*.toml",
}

// maxFile is the largest file that is read, in bytes. Kata's own have about 40 KiB.
const maxFile = 4 << 20

// File is one configuration, with its drop-ins applied.
type File struct {
	// Path is where the file is, below the root; symbolic links are resolved, since the drop-ins are beside the real file.
	Path string
	// DropIns are the files of config.d beside it, in the order in which they were applied.
	DropIns []string
	// Runtime is the one that the file is written for.
	Runtime Runtime
	// Hypervisors are its tables [hypervisor.NAME] by name; for runtime-rs only the one that the file chooses.
	Hypervisors map[string]Hypervisor
	// Err is why the file, or one of its drop-ins, cannot be read. Kata starts no sandbox with it.
	Err error
}

// Hypervisor is what in a table [hypervisor.NAME] matters for volumes.
type Hypervisor struct {
	// DisableBlockDeviceUse has the Go runtime ignore direct volumes; its own default since 3.26 is true.
	DisableBlockDeviceUse bool
	// Rootless moves the records of runtime-rs to a directory of a user that is made for each sandbox.
	Rootless bool
	// ConfidentialGuest has the guest's policy decide about statistics; the usual policies deny them.
	ConfidentialGuest bool
	// EnableAnnotations are patterns for the settings that a pod's annotations may change.
	EnableAnnotations []string
}

// Read returns the configuration files below root ("/" for this machine): those in the usual places, and more, which are
// absolute paths, or patterns of filepath.Match, as they are below root. A file that cannot be read is in the result, with
// its Err. There may be none.
func Read(root string, more ...string) ([]File, error) {
	files := map[string]File{}
	for _, pattern := range slices.Concat(patterns, more) {
		if !filepath.IsAbs(pattern) {
			return nil, fmt.Errorf("configuration of Kata: %q is not absolute", pattern)
		}
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, fmt.Errorf("configuration of Kata: %q: %w", pattern, err)
		}
		for _, path := range found {
			f := read(root, path)
			files[f.Path] = f
		}
	}
	list := make([]File, 0, len(files))
	for _, path := range slices.Sorted(maps.Keys(files)) {
		list = append(list, files[path])
	}
	return list, nil
}

// read reads the file that is at path for us. Links in it are followed as somebody at root would.
func read(root, path string) File {
	below, err := filepath.Rel(root, path)
	if err != nil {
		return File{Path: path, Err: err}
	}
	real, err := securejoin.SecureJoin(root, below)
	if err != nil {
		return File{Path: "/" + below, Err: err}
	}
	f := File{Path: trim(root, real)}
	tree, err := decode(real)
	if err != nil {
		f.Err = err
		return f
	}
	f.DropIns, f.Err = dropIns(root, filepath.Join(filepath.Dir(real), "config.d"), tree)
	if f.Err == nil {
		f.Err = f.fill(tree)
	}
	return f
}

// trim returns a path as it is below root.
func trim(root, path string) string {
	below, err := filepath.Rel(root, path)
	if err != nil {
		return path
	}
	return "/" + below
}

// dropIns merges the files of a directory into tree in the order of their names. Both runtimes take every entry for one,
// whatever its name ends in, and neither starts with one that it cannot read.
func dropIns(root, dir string, tree map[string]any) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		path, err := securejoin.SecureJoin(root, trim(root, filepath.Join(dir, e.Name())))
		if err != nil {
			return names, err
		}
		more, err := decode(path)
		if err != nil {
			return names, err
		}
		merge(tree, more)
		names = append(names, trim(root, filepath.Join(dir, e.Name())))
	}
	return names, nil
}

func decode(path string) (map[string]any, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes", path, maxFile)
	}
	var tree map[string]any
	if _, err := toml.DecodeFile(path, &tree); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return tree, nil
}

// merge puts the values of more into base, table by table.
func merge(base, more map[string]any) {
	for key, value := range more {
		table, isTable := value.(map[string]any)
		into, wasTable := base[key].(map[string]any)
		if isTable && wasTable {
			merge(into, table)
			continue
		}
		base[key] = value
	}
}

// fill takes what matters out of the merged tables. A value of another type than Kata's is an error, as it is for Kata.
func (f *File) fill(tree map[string]any) error {
	runtime, err := table(tree, "runtime")
	if err != nil {
		return err
	}
	f.Runtime = Go
	// Only runtime-rs says in its file which hypervisor it uses.
	chosen, rust := runtime["hypervisor_name"].(string)
	if rust {
		f.Runtime = Rust
	}
	all, err := table(tree, "hypervisor")
	if err != nil {
		return err
	}
	f.Hypervisors = map[string]Hypervisor{}
	for name := range all {
		if rust && name != chosen {
			continue
		}
		if f.Hypervisors[name], err = hypervisor(all, name); err != nil {
			return fmt.Errorf("%s: %w", f.Path, err)
		}
	}
	return nil
}

func table(tree map[string]any, name string) (map[string]any, error) {
	value, ok := tree[name]
	if !ok {
		return nil, nil
	}
	t, ok := value.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%s is no table", name)
	}
	return t, nil
}

func hypervisor(all map[string]any, name string) (Hypervisor, error) {
	var h Hypervisor
	settings, err := table(all, name)
	if err != nil {
		return h, err
	}
	for key, into := range map[string]*bool{
		"disable_block_device_use": &h.DisableBlockDeviceUse,
		"rootless":                 &h.Rootless,
		"confidential_guest":       &h.ConfidentialGuest,
	} {
		value, ok := settings[key]
		if !ok {
			continue
		}
		if *into, ok = value.(bool); !ok {
			return h, fmt.Errorf("[hypervisor.%s] %s is %v, which is no bool", name, key, value)
		}
	}
	list, _ := settings["enable_annotations"].([]any)
	for _, pattern := range list {
		if text, ok := pattern.(string); ok {
			h.EnableAnnotations = append(h.EnableAnnotations, text)
		}
	}
	return h, nil
}
