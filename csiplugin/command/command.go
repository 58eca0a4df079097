// Package command runs the tools that make, check and grow filesystems.
//
// There is never a shell, the locale is always C, and a tool does not outlive the process that started it by design: its
// process group is killed when the context ends, and the tool itself when this process dies. What the tool may still do
// in the moments between is guarded by whoever owns the device, not here.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// tail is how much of a tool's stderr an error carries, in bytes.
const tail = 1024

// waitDelay is how long a killed tool may keep its pipes open.
const waitDelay = 5 * time.Second

// Error is a tool that did not succeed.
type Error struct {
	// Argv is the command line. Options that may be confidential are masked by the caller of [Masked].
	Argv []string
	// ExitCode is the tool's exit code, or -1 if it did not start or was killed.
	ExitCode int
	// Stderr is the end of what it wrote to stderr.
	Stderr string
	cause  error
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: exit code %d", strings.Join(e.Argv, " "), e.ExitCode)
	if e.ExitCode < 0 {
		text = fmt.Sprintf("%s: %v", strings.Join(e.Argv, " "), e.cause)
	}
	if e.Stderr != "" {
		text += ": " + e.Stderr
	}
	return text
}

// Unwrap returns why the tool was ended early, if it was: the context's error, or that there is no such tool.
func (e *Error) Unwrap() error { return e.cause }

// Run runs a tool to its end and returns its stdout. A tool that does not exit with 0 is an [*Error]; if ctx has ended,
// that error is also ctx's.
func Run(ctx context.Context, argv ...string) ([]byte, error) { return Masked(ctx, argv, argv...) }

// Masked is [Run] for command lines that may hold something confidential: errors show shown instead of argv.
func Masked(ctx context.Context, shown []string, argv ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	// fsck starts the checker as a child of its own: the whole group has to go.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = waitDelay
	err := cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	failed := &Error{Argv: shown, ExitCode: -1, Stderr: lastOf(stderr.Bytes()), cause: err}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		failed.ExitCode = exit.ExitCode()
	}
	if ctx.Err() != nil {
		failed.cause = context.Cause(ctx)
	}
	return stdout.Bytes(), failed
}

func lastOf(b []byte) string {
	b = bytes.TrimSpace(b)
	if len(b) > tail {
		b = b[len(b)-tail:]
	}
	return strings.ToValidUTF8(string(b), "?")
}
