package configfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/containerd/errdefs"
)

// The header of a file. Both keys may be left out.
const (
	APIVersion = "crust.dev/v1"
	Kind       = "CrustdConfiguration"
)

// maxSize is the largest file in bytes.
const maxSize = 1 << 20

// File is what a file says. Paths are absolute, endpoints are "unix:///path".
type File struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`

	Drivers         []Driver `yaml:"drivers"`
	RuntimeEndpoint string   `yaml:"runtimeEndpoint"`
	KEPEndpoint     string   `yaml:"kepEndpoint"`
	// AdminEndpoint is nil if the file does not say; empty: none.
	AdminEndpoint   *string           `yaml:"adminEndpoint"`
	HTTP            HTTP              `yaml:"http"`
	RegistrationDir string            `yaml:"registrationDir"`
	StateDir        string            `yaml:"stateDir"`
	DeviceRoots     []string          `yaml:"deviceRoots"`
	Handlers        []Handler         `yaml:"handlers"`
	ShimHandler     string            `yaml:"shimHandler"`
	DefaultHandler  string            `yaml:"defaultHandler"`
	Policy          Policy            `yaml:"policy"`
	RuntimeClasses  map[string]string `yaml:"runtimeClasses"`
	// Kubernetes is nil if there is no API server to ask.
	Kubernetes *Kubernetes `yaml:"kubernetes"`
	Log        Log         `yaml:"log"`

	source
}

// Driver is a CSI driver; see crust.Driver.
type Driver struct {
	Endpoint string `yaml:"endpoint"`
	Upstream string `yaml:"upstream"`
	Register bool   `yaml:"register"`
}

// HTTP is where health and metrics are served.
type HTTP struct {
	Address   string `yaml:"address"`
	Profiling bool   `yaml:"profiling"`
}

// Policy says what is deferred.
type Policy struct {
	Default string `yaml:"default"`
}

// Kubernetes is an API server; see crust.Kubernetes.
type Kubernetes struct {
	Kubeconfig string `yaml:"kubeconfig"`
	Node       string `yaml:"node"`
}

// Log says what is logged, and how.
type Log struct {
	Level  string `yaml:"level"`
	Format string `yaml:"format"`
}

// Read reads a file. The error wraps [os.ErrNotExist] if there is none, and errdefs.ErrInvalidArgument if something is
// wrong in it; then it says everything that is wrong, a line each.
func Read(path string) (*File, error) {
	// Without O_NONBLOCK a named pipe would wait for a writer, and a daemon that reads its file again with it.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("configuration %s is not a regular file: %w", path, errdefs.ErrInvalidArgument))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	if len(text) > maxSize {
		return nil, fmt.Errorf("configuration %s has more than %d bytes: %w", path, maxSize, errdefs.ErrInvalidArgument)
	}
	return Parse(path, text)
}

// Parse reads a file's content. name is what errors call it. Its errors are those of Read.
func Parse(name string, text []byte) (*File, error) {
	f := &File{source: source{name: name, text: string(text), lines: map[string]int{}}}
	root, err := f.parse(text)
	if err != nil {
		return nil, err
	}
	d := decoder{source: f.source}
	d.decode(root, f, "")
	if len(d.errs) == 0 {
		f.check(&d)
	}
	if err := d.err(); err != nil {
		return nil, err
	}
	return f, nil
}

// source knows where in a file a value is.
type source struct {
	name  string
	text  string
	lines map[string]int // by path of keys ("drivers[0].endpoint")
}

// Errorf returns an error about the value at a path of keys, which wraps errdefs.ErrInvalidArgument.
func (s source) Errorf(path, format string, args ...any) error {
	return s.at(s.lines[path], fmt.Sprintf(format, args...))
}

// Has says whether the file has a value at a path of keys.
func (s source) Has(path string) bool { return s.lines[path] > 0 }

// SameText says whether two files are the same to the letter, so that even lines in errors are the same.
func (s source) SameText(other *File) bool { return s.text == other.text }

func (s source) at(line int, text string) error { return &Error{File: s.name, Line: line, Text: text} }

// Error is something wrong in a file. It wraps errdefs.ErrInvalidArgument.
type Error struct {
	File string
	Line int // 0 if it is about no line
	Text string
}

// Error is "file:line: text".
func (e *Error) Error() string {
	if e.Line == 0 {
		return e.File + ": " + e.Text
	}
	return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Text)
}

// Unwrap is errdefs.ErrInvalidArgument.
func (e *Error) Unwrap() error { return errdefs.ErrInvalidArgument }
