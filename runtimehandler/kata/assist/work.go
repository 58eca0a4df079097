package assist

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

// Step is one thing that the host may do in the place of a sandbox's agent.
type Step string

// The steps, in the order in which they are done.
const (
	Format Step = "format" // make a filesystem on a device that was never written
	Check  Step = "check"  // check it and repair what can be repaired without asking
	Grow   Step = "grow"   // make it as large as its device
	Chown  Step = "chown"  // give its files to a group
)

// Steps are all steps.
func Steps() []Step { return []Step{Format, Check, Grow, Chown} }

// Work is what is to be done with one device, which nobody else may use meanwhile.
type Work struct {
	Steps      []Step   `json:"steps"`
	Device     string   `json:"device"` // block device or image file; absolute
	FSType     string   `json:"fsType"`
	SizeBytes  int64    `json:"sizeBytes"`
	MountFlags []string `json:"mountFlags,omitempty"` // for the steps that need the filesystem mounted

	// On what grounds a filesystem may be made (docs/adr/0001-blankness.md): the device was never written, or by nothing
	// but an interrupted format of ours. Neither: it is not made.
	NeverWritten bool `json:"neverWritten,omitempty"`
	Unfinished   bool `json:"unfinished,omitempty"`

	Group          *uint32 `json:"group,omitempty"`
	OnRootMismatch bool    `json:"onRootMismatch,omitempty"`
}

// commandName is the argument that makes a program the child; see [Main].
const commandName = "crust-host-assist"

const (
	// maxResult is how much of the child's output is kept, in bytes.
	maxResult = 64 << 10
	// waitDelay is how long after the child's death its children may keep its pipes open.
	waitDelay = 5 * time.Second
)

// result is what the child answers on its standard output.
type result struct {
	Error string `json:"error,omitempty"`
	Kind  string `json:"kind,omitempty"`
}

// kinds are the kinds of errors that cross the pipe.
var kinds = map[string]error{
	"data loss":           errdefs.ErrDataLoss,
	"failed precondition": errdefs.ErrFailedPrecondition,
	"invalid argument":    errdefs.ErrInvalidArgument,
	"out of range":        errdefs.ErrOutOfRange,
	"resource exhausted":  errdefs.ErrResourceExhausted,
	"not implemented":     errdefs.ErrNotImplemented,
}

// Run does the work in a child process. program becomes the child; nil is this program itself, whose main function then has
// to call [Main]. When ctx ends the child is killed with all that it has started; ErrUnavailable says that it did not come
// to an end, and the next Run takes the device further. Errors of the work itself have the kinds of package filesystem.
func Run(ctx context.Context, program []string, w Work) error {
	input, err := json.Marshal(w)
	if err != nil {
		return fmt.Errorf("assist: %w", err)
	}
	if len(program) == 0 {
		program = []string{"/proc/self/exe"}
	}
	argv := append(program[:len(program):len(program)], commandName)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir()}
	cmd.Stdin = bytes.NewReader(input)
	stdout, stderr := &limited{}, &limited{}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		// Its mounts are seen by nobody else, and go with it.
		Unshareflags: syscall.CLONE_NEWNS,
		// It is the first process of a namespace, so its tools go with it (pid_namespaces(7)), and it goes with us.
		Cloneflags: syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
	}
	cmd.WaitDelay = waitDelay
	// The kernel sends that signal when the thread ends that has started the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	runErr := cmd.Run()
	if ctx.Err() != nil {
		return fmt.Errorf("assist %s on %s: it did not end in time and was stopped: %w: %w", list(w.Steps), w.Device, context.Cause(ctx), errdefs.ErrUnavailable)
	}
	var r result
	if runErr != nil || json.Unmarshal(stdout.Bytes(), &r) != nil {
		return fmt.Errorf("assist %s on %s: the child process %v: %s: %w", list(w.Steps), w.Device, errors.Join(runErr, errors.New("has not answered")),
			strings.TrimSpace(stderr.String()), errdefs.ErrUnavailable)
	}
	if r.Error == "" {
		return nil
	}
	kind := kinds[r.Kind]
	if kind == nil {
		kind = errdefs.ErrInternal
	}
	return fmt.Errorf("assist %s on %s: %s: %w", list(w.Steps), w.Device, r.Error, kind)
}

func list(steps []Step) string {
	words := make([]string, len(steps))
	for i, s := range steps {
		words[i] = string(s)
	}
	return strings.Join(words, ", ")
}

// limited keeps the beginning of what is written to it.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), maxResult-l.Len())])
	return len(p), nil
}
