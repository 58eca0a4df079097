// Package command runs the tools that make and check filesystems in the guest.
//
// There is never a shell, the locale is always C, standard input is always empty, and what a tool writes is kept only as
// far as somebody can read it.
package command

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Path is where programs are found in the guest.
const Path = "/usr/sbin:/usr/bin:/sbin:/bin"

const (
	maxOutput = 64 << 10        // of stdout that is kept, in bytes; more is cut off at the end
	maxTail   = 2 << 10         // of what a tool wrote last that an error carries, in bytes
	waitDelay = 5 * time.Second // how long a killed tool may keep its pipes open
)

// Result is what a tool that has run to its end left.
type Result struct {
	Argv   []string
	Code   int    // exit code
	Stdout string // cut off after 64 KiB
	Tail   string // the end of what it wrote to stdout and stderr
	Stderr string // the end of what it wrote to stderr
}

// Error is a tool that ended with an exit code that its caller did not expect, or that did not end by itself.
type Error struct {
	Argv  []string
	Code  int    // exit code; -1 if it did not start or was killed
	Tail  string // the end of what it wrote to stdout and stderr
	cause error
}

func (e *Error) Error() string {
	text := strings.Join(e.Argv, " ")
	if e.Code < 0 {
		text += fmt.Sprintf(": %v", e.cause)
	} else {
		text += fmt.Sprintf(": exit code %d", e.Code)
	}
	if e.Tail != "" {
		text += ": " + e.Tail
	}
	return text
}

// Unwrap returns why the tool did not end by itself: that of the context, or that it could not be started.
func (e *Error) Unwrap() error { return e.cause }

// Failed is the error for a result that the caller did not expect.
func (r Result) Failed() error { return &Error{Argv: r.Argv, Code: r.Code, Tail: r.Tail} }

// Run runs a tool to its end, whatever its exit code, and fails with an [*Error] only if it could not be started, was
// killed, or ctx has ended; it is then killed with all its children.
func Run(ctx context.Context, argv ...string) (Result, error) {
	path, err := look(argv[0])
	if err != nil {
		return Result{}, &Error{Argv: argv, Code: -1, cause: err}
	}
	stdout := &head{limit: maxOutput}
	all, stderr := &tail{limit: maxTail}, &tail{limit: maxTail}
	cmd := exec.CommandContext(ctx, path, argv[1:]...)
	cmd.Env = []string{"PATH=" + Path, "LC_ALL=C", "HOME=/root"}
	cmd.Stdout = both{stdout, all}
	cmd.Stderr = both{stderr, all}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = waitDelay
	err = cmd.Run()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	} else if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		err = nil
	}
	if err != nil {
		return Result{}, &Error{Argv: argv, Code: -1, Tail: all.String(), cause: err}
	}
	return Result{Argv: argv, Code: cmd.ProcessState.ExitCode(), Stdout: stdout.String(), Stderr: stderr.String(), Tail: all.String()}, nil
}

// look finds a tool in [Path], whatever our own environment says.
func look(name string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for dir := range strings.SplitSeq(Path, ":") {
		if path, err := exec.LookPath(dir + "/" + name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("not found in %s; it is missing in the guest's image", Path)
}

// Exists says whether there is a tool of a name.
func Exists(name string) bool {
	_, err := look(name)
	return err == nil
}
