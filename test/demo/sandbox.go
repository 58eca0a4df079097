package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// bootTimeout covers a machine that is emulated on a busy host.
const bootTimeout = 3 * time.Minute

// sandbox is one microVM, in the process of crust-sandbox.
type sandbox struct {
	w       *world
	id      string
	process *process
}

// buildImage makes the guest's kernel and initramfs.
func (w *world) buildImage(ctx context.Context) (string, error) {
	out, err := w.command(ctx, "crust-sandbox", "image", "--agent", filepath.Join(w.bin, "crust-agent"), "--out", w.path("image"))
	return strings.TrimSpace(out), err
}

// probe boots a guest under KVM, once; what it finds is noted for the sandboxes.
func (w *world) probe(ctx context.Context) (string, error) {
	out, err := w.command(ctx, "crust-sandbox", "probe", "--image", w.path("image"), "--accel-cache", w.path("accel.json"))
	return strings.TrimSpace(out), err
}

// startSandbox boots a microVM in which the volume is to appear at /data, and waits until it has.
func (w *world) startSandbox(ctx context.Context, id string, v *volume) (*sandbox, string, error) {
	ready, stdout, err := os.Pipe()
	if err != nil {
		return nil, "", err
	}
	defer ready.Close()
	p, err := w.start("sandbox-"+id, stdout, "crust-sandbox", "run", "--root", w.path("sandboxes"), "--id", id, "-o", "json",
		"--runtime-endpoint", "unix://"+w.path("runtime.sock"), "--image", w.path("image"), "--accel-cache", w.path("accel.json"),
		"--mount", "source="+v.target()+",destination=/data")
	err = errors.Join(err, stdout.Close())
	if err != nil {
		return nil, "", err
	}
	s := &sandbox{w: w, id: id, process: p}
	line := make(chan string, 1)
	go func() {
		scanner := bufio.NewScanner(ready)
		scanner.Scan()
		line <- scanner.Text()
	}()
	timeout := time.NewTimer(bootTimeout)
	defer timeout.Stop()
	select {
	case text := <-line:
		var info struct {
			Ready bool   `json:"ready"`
			Accel string `json:"accel"`
		}
		if err := json.Unmarshal([]byte(text), &info); err != nil || !info.Ready {
			return s, "", fmt.Errorf("the sandbox did not start (%q); see %s", text, p.log.Name())
		}
		return s, "accelerator " + info.Accel, nil
	case <-timeout.C:
		return s, "", fmt.Errorf("the sandbox is not ready after %v; see %s", bootTimeout, p.log.Name())
	case <-ctx.Done():
		return s, "", ctx.Err()
	}
}

// sh runs a shell command in the guest and returns its output.
func (s *sandbox) sh(ctx context.Context, script string) (string, error) {
	return s.w.command(ctx, "crust-sandbox", "exec", "--root", s.w.path("sandboxes"), s.id, "--", "sh", "-c", script)
}

func (s *sandbox) stop(ctx context.Context) (string, error) {
	if _, err := s.w.command(ctx, "crust-sandbox", "stop", "--root", s.w.path("sandboxes"), s.id); err != nil {
		return "", err
	}
	<-s.process.done
	return "", s.process.ended()
}

// command runs one of our commands to its end. On Ctrl-C it is asked to stop.
func (w *world) command(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(w.bin, name), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTimeout
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, args[0], err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
