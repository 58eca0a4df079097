package kata_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/handlertest"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
	stand "crust.dev/crust/test/kata"
)

func TestMain(m *testing.M) {
	assist.Main()
	os.Exit(m.Run())
}

// runtime is a node with Kata on it, for the suite: a sandbox per volume.
type runtime struct {
	t *testing.T
	*stand.Node
	kind      config.Runtime
	sandboxes map[string]*stand.Sandbox // by target path
}

func (r *runtime) Handler() runtimehandler.Handler {
	return newHandler(r.t, r.Node, kata.Config{})
}

func newHandler(t *testing.T, n *stand.Node, c kata.Config) *kata.Handler {
	t.Helper()
	c.Root = n.Root
	h, err := kata.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func (r *runtime) Mount(t *testing.T, d runtimehandler.Deferral) runtimehandler.Sandbox {
	t.Helper()
	s := r.Start(fmt.Sprintf("sandbox-%d", len(r.sandboxes)), stand.Options{Runtime: r.kind}).Boot()
	r.sandboxes[d.TargetPath] = s
	source, err := filepath.EvalSymlinks(d.TargetPath)
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.CreateContainer("container-"+s.ID, stand.Mount{Source: source, Destination: "/data", ReadOnly: d.ReadOnly})
	if err != nil {
		t.Fatal(err)
	}
	if !out.Attached || out.Volume.Device != d.Device || out.Volume.FSType != d.FSType || fmt.Sprint(out.Volume.Options) != fmt.Sprint(d.MountFlags) {
		t.Errorf("the sandbox has %+v of %+v", out, d)
	}
	return runtimehandler.Sandbox{ID: s.ID, Runtime: "kata-" + string(r.kind), Address: s.Socket()}
}

func (r *runtime) Unmount(_ *testing.T, d runtimehandler.Deferral) { r.sandboxes[d.TargetPath].Stop() }
func (r *runtime) Hang(_ *testing.T, d runtimehandler.Deferral)    { r.sandboxes[d.TargetPath].Hang(true) }

func (r *runtime) Lose(t *testing.T) {
	t.Helper()
	if err := os.RemoveAll(r.Path("run")); err != nil {
		t.Fatal(err)
	}
}

func TestContract(t *testing.T) {
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		t.Run(string(kind), func(t *testing.T) {
			handlertest.Run(t, func(t *testing.T) handlertest.Runtime {
				return &runtime{t: t, Node: stand.New(t), kind: kind, sandboxes: map[string]*stand.Sandbox{}}
			})
		})
	}
}
