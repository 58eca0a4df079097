package e2e

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"crust.dev/crust/test/node"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

const mib = 1 << 20

// built is a directory with the commands and, in "image", the guest's image.
var built string

func TestMain(m *testing.M) {
	var err error
	if built, err = os.MkdirTemp("", "crust-e2e-"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(built)
	os.Exit(code)
}

var build = sync.OnceValue(func() error {
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", built+"/",
		"crust.dev/crust/cmd/crustd", "crust.dev/crust/cmd/crust-csi", "crust.dev/crust/cmd/crust-agent", "crust.dev/crust/cmd/crust-sandbox")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	if out, err := exec.Command(filepath.Join(built, "crust-sandbox"), "image", "--agent", filepath.Join(built, "crust-agent"), "--out", filepath.Join(built, "image")).CombinedOutput(); err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	return nil
})

// start starts a node's services, which end with the test and must leave nothing behind.
func start(t testing.TB, change ...func(*node.Node)) *node.Node {
	t.Helper()
	priv.Root(t)
	vm.Need(t)
	if err := build(); err != nil {
		t.Fatal(err)
	}
	n, err := node.New(built, "/var/tmp") // direct I/O needs a filesystem that is not in memory
	if err != nil {
		t.Fatal(err)
	}
	n.Image, n.Accel = filepath.Join(built, "image"), string(vm.Accel(t))
	for _, change := range change {
		change(n)
	}
	t.Cleanup(func() {
		if err := errors.Join(n.Close(), node.Leftovers(n.Dir)); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			for _, p := range []*node.Process{n.Driver, n.Daemon} {
				if p != nil {
					t.Log(p.Log())
				}
			}
		}
		_ = os.RemoveAll(n.Dir)
	})
	must(t, n.StartServices(ctx(t)))
	return n
}

// ctx bounds one step of a test; a microVM under emulation on a busy machine is slow.
func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 4*time.Minute)
	t.Cleanup(cancel)
	return c
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// published is a volume that was created, staged and published for a pod.
func published(t testing.TB, n *node.Node, name, fsType string, size int64) *node.Volume {
	t.Helper()
	v := n.Volume(name, fsType)
	must(t, v.Create(ctx(t), size))
	must(t, v.Stage(ctx(t)))
	must(t, v.Publish(ctx(t), "pod-"+name))
	return v
}

// sandbox boots a microVM with mounts.
func sandbox(t testing.TB, n *node.Node, id string, mounts ...node.Mount) *node.Sandbox {
	t.Helper()
	s, err := n.StartSandbox(ctx(t), id, mounts...)
	must(t, err)
	return s
}

// sh runs a shell command in a sandbox.
func sh(t testing.TB, s *node.Sandbox, script string) string {
	t.Helper()
	out, err := s.Sh(ctx(t), script)
	must(t, err)
	return strings.TrimSpace(out)
}

// eventually waits until fn succeeds.
func eventually(t testing.TB, what string, fn func() error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
