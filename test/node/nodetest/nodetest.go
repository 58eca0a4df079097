// Package nodetest gives a test a node of its own.
package nodetest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"google.golang.org/grpc"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/test/node"
)

// New builds commands of this project into bin and makes a node of them, which is not started. At the test's end it is closed, and
// the test fails if it leaves something behind. The logs of a test that has failed are shown.
func New(t testing.TB, commands ...string) (n *node.Node, bin string) {
	t.Helper()
	bin = t.TempDir()
	args := []string{"build", "-trimpath", "-buildvcs=false", "-o", bin + "/"}
	for _, name := range commands {
		args = append(args, "crust.dev/crust/cmd/"+name)
	}
	build := exec.Command("go", args...)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	n, err := node.New(bin, "/var/tmp") // direct I/O needs a filesystem that is not in memory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(n.Close(), node.Leftovers(n.Dir)); err != nil {
			t.Error(err)
		}
		for _, p := range []*node.Process{n.Driver, n.Daemon} {
			if t.Failed() && p != nil {
				t.Log(p.Log())
			}
		}
		_ = os.RemoveAll(n.Dir)
	})
	return n, bin
}

// Dial connects to the node's driver, as sidecars do, until the test ends.
func Dial(t testing.TB, n *node.Node) *grpc.ClientConn {
	t.Helper()
	conn, err := rpc.Dial(n.Path("csi.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// Context bounds one step of a test; a microVM under emulation on a busy machine is slow. It outlives the test's own context,
// so that cleaning up can use it.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}
