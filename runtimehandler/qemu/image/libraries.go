package image

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
)

// defaultLibraryDirs are searched last, as ld.so(8) does.
var defaultLibraryDirs = []string{"/lib", "/usr/lib", "/lib64", "/usr/lib64"}

// libraries finds the shared libraries of programs under a root, the way ld.so(8) would.
type libraries struct {
	root  string
	dirs  []string          // of /etc/ld.so.conf, and the default ones
	found map[string]string // path by soname
}

func newLibraries(root string) (*libraries, error) {
	dirs, err := readLdSoConf(root, "/etc/ld.so.conf", 0)
	if err != nil {
		return nil, err
	}
	return &libraries{root: root, dirs: append(dirs, defaultLibraryDirs...), found: map[string]string{}}, nil
}

// maxIncludes bounds how deep include lines of ld.so.conf may nest.
const maxIncludes = 8

// readLdSoConf returns the directories of an ld.so.conf(5), include lines followed. It is no error if there is none.
func readLdSoConf(root, path string, depth int) ([]string, error) {
	f, err := os.Open(filepath.Join(root, path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("library path: %w", err)
	}
	defer f.Close()
	var dirs []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0:
		case fields[0] == "include" && depth < maxIncludes:
			included, err := includeLdSoConf(root, filepath.Dir(path), fields[1:], depth)
			if err != nil {
				return nil, err
			}
			dirs = append(dirs, included...)
		case filepath.IsAbs(fields[0]):
			dirs = append(dirs, fields[0])
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("library path: %w", err)
	}
	return dirs, nil
}

func includeLdSoConf(root, dir string, patterns []string, depth int) ([]string, error) {
	var dirs []string
	for _, pattern := range patterns {
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join(dir, pattern)
		}
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, fmt.Errorf("library path: include %s: %w", pattern, err)
		}
		for _, file := range files { // Glob sorts
			rel, err := filepath.Rel(root, file)
			if err != nil {
				return nil, fmt.Errorf("library path: %w", err)
			}
			more, err := readLdSoConf(root, "/"+rel, depth+1)
			if err != nil {
				return nil, err
			}
			dirs = append(dirs, more...)
		}
	}
	return dirs, nil
}

// add finds everything that a program, or a library, needs to be loaded. A program without an interpreter is static and
// needs nothing; a file that is not an ELF file needs nothing that can be found out.
func (l *libraries) add(path string) error {
	f, err := elf.Open(path)
	var format *elf.FormatError
	if errors.As(err, &format) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("guest image: %s: %w", path, err)
	}
	defer f.Close()
	if interpreter, err := interpreterOf(f); err != nil {
		return fmt.Errorf("guest image: %s: %w", path, err)
	} else if interpreter != "" {
		l.found[filepath.Base(interpreter)] = filepath.Join(l.root, interpreter)
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("guest image: %s: %w", path, err)
	}
	for _, soname := range needed {
		if _, ok := l.found[soname]; ok {
			continue
		}
		lib, err := l.find(f, filepath.Dir(path), soname)
		if err != nil {
			return fmt.Errorf("guest image: %s: %w", path, err)
		}
		l.found[soname] = lib
		if err := l.add(lib); err != nil {
			return err
		}
	}
	return nil
}

// find looks for a library in the search path of the file that needs it.
func (l *libraries) find(user *elf.File, origin, soname string) (string, error) {
	var dirs []string
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		paths, err := user.DynString(tag)
		if err != nil {
			return "", err
		}
		for _, list := range paths {
			for dir := range strings.SplitSeq(list, ":") {
				dir = strings.NewReplacer("${ORIGIN}", "$ORIGIN").Replace(dir)
				if rest, ok := strings.CutPrefix(dir, "$ORIGIN"); ok {
					dirs = append(dirs, filepath.Join(origin, rest))
				} else if filepath.IsAbs(dir) {
					dirs = append(dirs, filepath.Join(l.root, dir))
				}
			}
		}
	}
	for _, dir := range l.dirs {
		dirs = append(dirs, filepath.Join(l.root, dir))
	}
	for _, dir := range dirs {
		path := filepath.Join(dir, soname)
		lib, err := elf.Open(path)
		if err != nil {
			continue // not there, or a linker script: ld.so goes on, too
		}
		fits := lib.Class == user.Class && lib.Machine == user.Machine
		_ = lib.Close()
		if fits {
			return path, nil
		}
	}
	return "", fmt.Errorf("library %s is in none of %s: %w", soname, strings.Join(dirs, ", "), errdefs.ErrNotFound)
}

// interpreterOf returns the program interpreter (PT_INTERP), or nothing for a library or a static program.
func interpreterOf(f *elf.File) (string, error) {
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		raw := make([]byte, p.Filesz)
		if _, err := p.ReadAt(raw, 0); err != nil {
			return "", fmt.Errorf("interpreter: %w", err)
		}
		return strings.TrimRight(string(raw), "\x00"), nil
	}
	return "", nil
}
