package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"crust.dev/crust/test/node"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

// demoRun is a demo in a process of its own.
type demoRun struct {
	cmd    *exec.Cmd
	stdout io.ReadCloser
	stderr strings.Builder
	dir    string
}

// startDemo builds the commands as `make demo` does, and starts it with JSON output.
func startDemo(t *testing.T) *demoRun {
	t.Helper()
	priv.Root(t)
	vm.Need(t)
	bin := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", bin+"/", "crust.dev/crust/cmd/...", "crust.dev/crust/test/demo")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d := &demoRun{}
	var err error
	if d.dir, err = os.MkdirTemp("/var/tmp", "crust-"); err != nil { // t.TempDir is too long for sockets
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(d.dir) })
	d.cmd = exec.Command(filepath.Join(bin, "demo"), "-bin", bin, "-dir", d.dir, "-json")
	d.cmd.Stderr = &d.stderr
	if d.stdout, err = d.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return d
}

// lines hands every line of the output to see, and returns the last.
func (d *demoRun) lines(t *testing.T, see func(line)) (end struct {
	Passed, Failed int
	Interrupted    bool
}) {
	t.Helper()
	last := ""
	for s := bufio.NewScanner(d.stdout); s.Scan(); {
		last = s.Text()
		t.Log(last)
		var l line
		if err := json.Unmarshal([]byte(last), &l); err != nil {
			t.Errorf("%q: %v", last, err)
		}
		if l.Name != "" {
			see(l)
		}
	}
	if err := json.Unmarshal([]byte(last), &end); err != nil {
		t.Errorf("last line %q: %v", last, err)
	}
	return end
}

// nothingLeft checks what the demo promises of its end.
func (d *demoRun) nothingLeft(t *testing.T) {
	t.Helper()
	if err := node.Leftovers(d.dir); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(d.dir); err != nil || len(entries) > 0 {
		t.Errorf("files are left: %v, error %v", entries, err)
	}
}

func TestDemo(t *testing.T) {
	d := startDemo(t)
	steps := map[string]int{}
	end := d.lines(t, func(l line) {
		if !l.OK || l.Error != "" {
			t.Errorf("step %d, %s: %s", l.Step, l.Name, l.Error)
		}
		steps[l.Filesystem]++
	})
	if err := d.cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, &d.stderr)
	}
	if steps["ext4"] == 0 || steps["ext4"] != steps["xfs"] || end.Passed != steps["ext4"]+steps["xfs"]+steps[""] || end.Failed != 0 {
		t.Errorf("steps %v, end %+v", steps, end)
	}
	d.nothingLeft(t)
}

// TestInterruptedDemo sends what Ctrl-C sends, while a microVM runs with a volume mounted.
func TestInterruptedDemo(t *testing.T) {
	d := startDemo(t)
	end := d.lines(t, func(l line) {
		if strings.HasPrefix(l.Name, "look at the mount") {
			if err := d.cmd.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
		}
	})
	var exit *exec.ExitError
	if err := d.cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 128+int(syscall.SIGINT) {
		t.Errorf("the demo ended with %v: %s", err, &d.stderr)
	}
	if !end.Interrupted || end.Failed != 0 {
		t.Errorf("end %+v", end)
	}
	d.nothingLeft(t)
}
