package cluster

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"crust.dev/crust/test/node"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

// need skips a test unless CRUST_REQUIRE has "cluster": the programs take many minutes to build.
func need(t testing.TB) {
	t.Helper()
	if !priv.Required("cluster") {
		t.Skip("runs where CRUST_REQUIRE contains cluster, as make e2e has it")
	}
	priv.Root(t)
	vm.Need(t)
}

func step(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// engine is a containerd with the shim, beside a driver and a daemon, without Kubernetes.
type engine struct {
	*Cluster
	node *node.Node
	t    testing.TB
}

func startEngine(t testing.TB) *engine {
	t.Helper()
	need(t)
	root, err := filepath.Abs("../../..")
	must(t, err)
	bin, err := Build(t.Context(), root, os.Stderr, "containerd")
	must(t, err)
	c, err := newCluster(root, bin, "/var/tmp")
	must(t, err)
	n, err := node.New(c.ours, "/var/tmp")
	must(t, err)
	e := &engine{c, n, t}
	t.Cleanup(func() {
		if t.Failed() {
			raw, _ := os.ReadFile(c.Containerd.Log())
			t.Logf("containerd:\n%s\ncrustd:\n%s", raw[max(0, len(raw)-8000):], n.Daemon.Log())
		}
		if err := errors.Join(c.Close(), n.Close()); err != nil {
			t.Error(err)
		}
		// A loop device is there for as long as somebody looks at it, who may be a stranger.
		eventually(t, "left behind", func(context.Context) error { return node.Leftovers(n.Dir) })
		if err := os.RemoveAll(n.Dir); err != nil {
			t.Error(err)
		}
	})
	must(t, n.StartServices(step(t)))
	must(t, c.configure(step(t)))
	shim, err := os.ReadFile(c.path("shim.yaml"))
	must(t, err)
	shim = bytes.ReplaceAll(shim, []byte(c.path("runtime.sock")), []byte(n.Path("runtime.sock")))
	must(t, os.WriteFile(c.path("shim.yaml"), append(shim, "accel: "+string(vm.Accel(t))+"\n"...), 0o600))
	must(t, c.makeGuestImage(step(t)))
	must(t, c.startContainerd(step(t)))
	return e
}

// run runs a container to its end.
func (e *engine) run(args ...string) (stdout, stderr string, code int) {
	e.t.Helper()
	cmd := exec.CommandContext(step(e.t), e.program("ctr"), append([]string{
		"--address", e.path("containerd.sock"), "--namespace", "k8s.io", "run", "--rm", "--runtime", "io.containerd.crust.v2", "--runtime-config-path", e.path("shim.yaml"),
	}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return out.String(), errs.String(), exit.ExitCode()
		}
		e.t.Fatal(err)
	}
	return out.String(), errs.String(), 0
}

// TestContainerd runs containers by hand, as ctr does.
func TestContainerd(t *testing.T) {
	e := startEngine(t)
	v := e.node.Volume("data", "ext4")
	must(t, v.Create(step(t), 256<<20))
	must(t, v.Stage(step(t)))
	must(t, v.Publish(step(t), "pod-1"))

	t.Run("arguments, environment, user, directory, streams, exit code", func(t *testing.T) {
		stdout, stderr, code := e.run("--env", "A=b c", "--user", "1000:1000", "--cwd", "/job/dir", Image, "c1",
			"/bin/sh", "-c", `echo "$A" $(id -u):$(id -g) $PWD $HOME $1; echo oops >&2; exit 7`, "sh", "x y")
		if want := "b c 1000:1000 /job/dir /home x y\n"; stdout != want || !strings.Contains(stderr, "oops") || code != 7 {
			t.Errorf("%q, %q, %d", stdout, stderr, code)
		}
	})
	t.Run("a program that is not there", func(t *testing.T) {
		if _, stderr, code := e.run(Image, "c2", "/nowhere"); code == 0 || !strings.Contains(stderr, "/nowhere") {
			t.Errorf("%q, %d", stderr, code)
		}
	})
	t.Run("a deferred volume is in the guest and not on the host", func(t *testing.T) {
		mount := "type=bind,src=" + v.Target() + ",dst=/data,options=rbind:rw"
		if stdout, stderr, code := e.run("--mount", mount, Image, "c3", "/bin/sh", "-c", "grep ' /data ' /proc/mounts && echo hello > /data/f"); code != 0 || !strings.Contains(stdout, "/dev/vd") {
			t.Errorf("%q, %q, %d", stdout, stderr, code)
		}
		if left, err := os.ReadDir(v.Target()); err != nil || len(left) > 0 {
			t.Errorf("on the host: %v, %v", left, err)
		}
		if stdout, stderr, code := e.run("--mount", mount, Image, "c4", "/bin/cat", "/data/f"); code != 0 || stdout != "hello\n" {
			t.Errorf("%q, %q, %d", stdout, stderr, code)
		}
	})
	t.Run("a directory of the host is refused", func(t *testing.T) {
		if _, stderr, code := e.run("--mount", "type=bind,src=/srv,dst=/srv,options=rbind:ro", Image, "c5", "/bin/true"); code == 0 || !strings.Contains(stderr, "not shared") {
			t.Errorf("%q, %d", stderr, code)
		}
	})
}
