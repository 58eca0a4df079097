package command_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"crust.dev/crust/csiplugin/command"
)

func TestRun(t *testing.T) {
	out, err := command.Run(t.Context(), "sh", "-c", "echo out; echo err >&2; printenv LC_ALL")
	if err != nil || string(out) != "out\nC\n" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestAnErrorSaysWhatAnOperatorNeeds(t *testing.T) {
	out, err := command.Run(t.Context(), "sh", "-c", "echo out; echo "+strings.Repeat("x", 5000)+" the end >&2; exit 3")
	var failed *command.Error
	if !errors.As(err, &failed) || failed.ExitCode != 3 || string(out) != "out\n" {
		t.Fatalf("got %q, %v", out, err)
	}
	if !strings.HasSuffix(err.Error(), "the end") || !strings.Contains(err.Error(), "exit code 3") || len(failed.Stderr) > 1024 {
		t.Errorf("got %v", err)
	}
	_, err = command.Masked(t.Context(), []string{"sh", "..."}, "sh", "-c", "exit 1 # hunter2")
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
	if _, err := command.Run(t.Context(), "no-such-tool"); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("got %v", err)
	}
}

// TestACancelledToolEndsWithItsChildren starts a tool that starts another one.
func TestACancelledToolEndsWithItsChildren(t *testing.T) {
	note := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := command.Run(ctx, "sh", "-c", "sleep 600 & echo $! > "+note+".new; mv "+note+".new "+note+"; wait")
		ended <- err
	}()
	var pid int
	for deadline := time.Now().Add(20 * time.Second); pid == 0; time.Sleep(time.Millisecond) {
		raw, _ := os.ReadFile(note)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(raw)))
		if time.Now().After(deadline) {
			t.Fatal("the tool did not start")
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	for deadline := time.Now().Add(20 * time.Second); syscall.Kill(pid, 0) == nil; time.Sleep(time.Millisecond) {
		if stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); strings.Contains(string(stat), ") Z ") {
			return // nobody has waited for it yet
		}
		if time.Now().After(deadline) {
			t.Fatal("the tool's child goes on")
		}
	}
}
