package command_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"crust.dev/crust/runtimehandler/guest/command"
)

func TestRun(t *testing.T) {
	r, err := command.Run(t.Context(), "sh", "-c", "echo out; echo err >&2; exit 4")
	if err != nil {
		t.Fatal(err)
	}
	if r.Code != 4 || r.Stdout != "out\n" || r.Stderr != "err" || !strings.Contains(r.Tail, "out") || !strings.Contains(r.Tail, "err") {
		t.Errorf("%+v", r)
	}
	for _, want := range []string{"sh -c", "exit code 4", "err"} {
		if text := r.Failed().Error(); !strings.Contains(text, want) {
			t.Errorf("the error %q does not have %q", text, want)
		}
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("LC_ALL", "xx_XX")
	t.Setenv("SECRET", "x")
	r, err := command.Run(t.Context(), "env")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(r.Stdout, "LC_ALL=C\n") || strings.Contains(r.Stdout, "SECRET") {
		t.Errorf("the environment is %s", r.Stdout)
	}
}

func TestNoInput(t *testing.T) {
	r, err := command.Run(t.Context(), "cat")
	if err != nil || r.Code != 0 || r.Stdout != "" {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestOutputIsBounded(t *testing.T) {
	r, err := command.Run(t.Context(), "sh", "-c", "yes head | head -c 1000000; echo the end")
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Stdout) != 64<<10 || len(r.Tail) > 4<<10 || !strings.HasSuffix(r.Tail, "the end") || strings.Contains(r.Tail, "\n") {
		t.Errorf("%d bytes of output, the end is %q", len(r.Stdout), r.Tail)
	}
}

func TestMissingTool(t *testing.T) {
	var failed *command.Error
	if _, err := command.Run(t.Context(), "no-such-tool"); !errors.As(err, &failed) || failed.Code != -1 {
		t.Errorf("error %v", err)
	}
	if command.Exists("no-such-tool") || !command.Exists("sh") {
		t.Error("Exists is wrong")
	}
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := command.Run(ctx, "sh", "-c", "echo before; sleep 1000 & wait")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "before") {
		t.Errorf("error %v", err)
	}
	if waited := time.Since(start); waited > 30*time.Second {
		t.Errorf("it took %v", waited)
	}
}

func TestKilled(t *testing.T) {
	var failed *command.Error
	if _, err := command.Run(t.Context(), "sh", "-c", "kill -SEGV $$"); !errors.As(err, &failed) || failed.Code != -1 || !strings.Contains(err.Error(), "segmentation fault") {
		t.Errorf("error %v", err)
	}
}
