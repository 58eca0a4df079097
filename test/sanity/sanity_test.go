package sanity

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"crust.dev/crust/test/node"
	"crust.dev/crust/test/priv"
)

// TestCSISanity asks the driver directly and through the daemon.
func TestCSISanity(t *testing.T) {
	priv.Root(t)
	n := start(t)
	Run(t, n.Dir, nil, n.Path("csi.sock"), n.Path("crustd.sock"))
}

// start builds the commands and starts the driver and the daemon.
func start(t *testing.T) *node.Node {
	t.Helper()
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin+"/", "../../cmd/crust-csi", "../../cmd/crustd")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	n, err := node.New(bin, os.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	n.DriverArgs = []string{"--pool-size", "8Gi"}
	if err := n.StartServices(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the driver's log:\n%s", n.Driver.Log())
			return
		}
		if err := os.RemoveAll(n.Dir); err != nil {
			t.Error(err)
		}
	})
	return n
}

// TestNothingIsLeft looks for what the suite's volumes may have left behind on this machine.
func TestNothingIsLeft(t *testing.T) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if raw, err := os.ReadFile(file); err == nil && strings.Contains(string(raw), "crust-node-") && strings.Contains(string(raw), "-vol-") {
			t.Errorf("%s is still %s", file, raw)
		}
	}
}
