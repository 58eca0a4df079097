package node

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

// Sandbox is one microVM, in the process of crust-sandbox.
type Sandbox struct {
	// Accel is the accelerator that it runs with.
	Accel string

	// Process is crust-sandbox, which owns the machine as a shim does.
	Process *Process
	// VMM is the process of the machine.
	VMM int

	n  *Node
	id string
}

// BuildImage makes the guest's kernel and initramfs, and says of what.
func (n *Node) BuildImage(ctx context.Context) (string, error) {
	out, err := n.command(ctx, "crust-sandbox", "image", "--agent", filepath.Join(n.bin, "crust-agent"), "--out", n.Image)
	return strings.TrimSpace(out), err
}

// Probe boots a guest under KVM, once; what it finds is noted for the sandboxes.
func (n *Node) Probe(ctx context.Context) (string, error) {
	out, err := n.command(ctx, "crust-sandbox", "probe", "--image", n.Image, "--accel-cache", n.Path("accel.json"))
	return strings.TrimSpace(out), err
}

// Mount is one of a sandbox: a path on the host, as a container runtime gets it, and where it is to appear inside.
type Mount struct {
	Source, Destination string
}

// StartSandbox boots a microVM with mounts, and waits until they are there.
func (n *Node) StartSandbox(ctx context.Context, id string, mounts ...Mount) (*Sandbox, error) {
	ready, stdout, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	args := []string{
		"run", "--root", n.Path("sandboxes"), "--id", id, "-o", "json", "--accel", n.Accel,
		"--runtime-endpoint", "unix://" + n.Path("runtime.sock"), "--image", n.Image, "--accel-cache", n.Path("accel.json"),
	}
	for _, m := range mounts {
		args = append(args, "--mount", "source="+m.Source+",destination="+m.Destination)
	}
	p, err := n.start("sandbox-"+id, stdout, "crust-sandbox", args...)
	err = errors.Join(err, stdout.Close())
	if err != nil {
		return nil, err
	}
	s := &Sandbox{n: n, id: id, Process: p}
	n.sandboxes = append(n.sandboxes, s)
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
			Ready  bool   `json:"ready"`
			Accel  string `json:"accel"`
			VMMPID int    `json:"vmmPid"`
		}
		if err := json.Unmarshal([]byte(text), &info); err != nil || !info.Ready {
			<-p.done
			return nil, fmt.Errorf("the sandbox did not start: %s", lastLine(p.Log()))
		}
		s.Accel, s.VMM = info.Accel, info.VMMPID
		return s, nil
	case <-timeout.C:
		return nil, fmt.Errorf("the sandbox is not ready after %v; see %s", bootTimeout, p.log.Name())
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// Sh runs a shell command in the guest and returns its output.
func (s *Sandbox) Sh(ctx context.Context, script string) (string, error) {
	return s.n.command(ctx, "crust-sandbox", "exec", "--root", s.n.Path("sandboxes"), s.id, "--", "sh", "-c", script)
}

// Stop has the guest unmount everything and end.
func (s *Sandbox) Stop(ctx context.Context) error {
	if _, err := s.n.command(ctx, "crust-sandbox", "stop", "--root", s.n.Path("sandboxes"), s.id); err != nil {
		return err
	}
	<-s.Process.done
	return s.Process.ended()
}

// command runs one of our commands to its end. On Ctrl-C it is asked to stop.
func (n *Node) command(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(n.bin, name), args...)
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
