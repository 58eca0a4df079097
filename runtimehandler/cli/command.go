package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
)

const (
	// maxCommandFile is the largest runtime-cli file in bytes: a path and a line feed.
	maxCommandFile = 4097
	// maxOutput is how much of a command's output is read, in bytes.
	maxOutput = 64 << 10
)

// Status looks for runtime-cli: the runtime puts it there once it has mounted the volume.
func (h *Handler) Status(_ context.Context, targetPath string, _ *runtimehandler.Sandbox) (runtimehandler.Status, error) {
	root, err := h.open()
	if err != nil {
		return runtimehandler.Status{}, err
	}
	defer root.Close()
	command, err := readCommand(root, targetPath)
	if errors.Is(err, fs.ErrNotExist) {
		return runtimehandler.Status{}, nil
	}
	if err != nil {
		return runtimehandler.Status{}, fmt.Errorf("handler %s: %s of %s: %w", h.config.Name, commandName, targetPath, err)
	}
	return runtimehandler.Status{
		Mounted: true,
		Sandbox: &runtimehandler.Sandbox{ID: h.config.Name + "-" + recordName(targetPath)[:12], Runtime: filepath.Base(command), Address: command},
	}, nil
}

func readCommand(root *os.Root, targetPath string) (string, error) {
	f, err := root.Open(path.Join(recordName(targetPath), commandName))
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := trusted(f); err != nil {
		return "", err
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxCommandFile))
	if err != nil {
		return "", err
	}
	command := strings.TrimSuffix(string(raw), "\n")
	if !filepath.IsAbs(command) || filepath.Clean(command) != command || strings.ContainsAny(command, "\n\x00") {
		return "", fmt.Errorf("%q is not a clean absolute path: %w", command, errdefs.ErrFailedPrecondition)
	}
	return command, nil
}

// trusted refuses files that others than root, or the daemon's own user, could have written: what they name is run as
// root.
func trusted(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() || st.Uid != 0 && int(st.Uid) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s must be a regular file of root's that nobody else can write: %w", f.Name(), errdefs.ErrPermissionDenied)
	}
	return nil
}

// run calls the runtime's command and decodes its output.
func (h *Handler) run(ctx context.Context, sandbox runtimehandler.Sandbox, into any, args ...string) error {
	f, err := os.Open(sandbox.Address)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("command %s is not there: %w", sandbox.Address, errdefs.ErrUnavailable)
	}
	if err != nil {
		return fmt.Errorf("command: %w", err)
	}
	err = errors.Join(trusted(f), f.Close())
	if err != nil {
		return fmt.Errorf("command: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, h.config.Timeout)
	defer cancel()
	stdout, stderr := &limited{left: maxOutput}, &limited{left: maxOutput}
	cmd := exec.CommandContext(ctx, sandbox.Address, args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// Its children may keep the pipes open; they are not waited for.
	cmd.WaitDelay = h.config.Timeout / 10
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = cmd.Run()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what it has left running
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		if ctx.Err() != nil {
			return fmt.Errorf("%s %s: no answer within %v: %w", sandbox.Address, strings.Join(args, " "), h.config.Timeout, errdefs.ErrUnavailable)
		}
		return fmt.Errorf("%s %s: %w: %s: %w", sandbox.Address, strings.Join(args, " "), err, lastLine(stderr.Bytes()), errdefs.ErrUnavailable)
	}
	if err := json.Unmarshal(stdout.Bytes(), into); err != nil {
		return fmt.Errorf("%s %s: answer is not what KEP-2857 says: %w: %w", sandbox.Address, strings.Join(args, " "), err, errdefs.ErrUnavailable)
	}
	return nil
}

// limited keeps the beginning of what is written to it.
type limited struct {
	bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	l.Buffer.Write(p[:n])
	return len(p), nil
}

func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

// Expand has the runtime's command resize the volume.
func (h *Handler) Expand(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox, requiredBytes int64) (int64, error) {
	var answer struct {
		CapacityBytes int64 `json:"capacity_bytes"`
	}
	if err := h.run(ctx, sandbox, &answer, "crust", "resize", targetPath, strconv.FormatInt(requiredBytes, 10), "0"); err != nil {
		return 0, err
	}
	if answer.CapacityBytes < max(requiredBytes, 1) {
		return 0, fmt.Errorf("%s has resized %s to %d bytes, %d were required: %w", sandbox.Address, targetPath, answer.CapacityBytes, requiredBytes, errdefs.ErrUnavailable)
	}
	return answer.CapacityBytes, nil
}
