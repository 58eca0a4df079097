package kata_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
	stand "crust.dev/crust/test/kata"
	"crust.dev/crust/test/priv"
)

// TestTrap11SubPath: the source of a subPath has no record, so Kata shares the directory.
func TestTrap11SubPath(t *testing.T) {
	priv.Root(t)
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		n := stand.New(t)
		h := newHandler(t, n, kata.Config{ProofTimeout: now})
		if h.Capabilities().SubPath {
			t.Error("it is promised")
		}
		d := volume(t, n, "u1", "v1")
		mustStage(t, h, d)
		source := n.Path("pods/u1/volume-subpaths/v1/app/0")
		if err := os.MkdirAll(source, 0o750); err != nil {
			t.Fatal(err)
		}
		s := n.Start("s1", stand.Options{Runtime: kind}).Boot()
		if out, err := s.CreateContainer("c", stand.Mount{Source: source, Destination: "/data"}); err != nil || out.Attached {
			t.Fatalf("the stand-in is no trap: %+v, %v", out, err)
		}
		isBreached(t, h, d, s, "subPath")
	}
}

// TestTrap12Rootless: runtime-rs looks for the record in the directory of a user that it has just made.
func TestTrap12Rootless(t *testing.T) {
	priv.Root(t)
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{ProofTimeout: now})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	s := n.Start("s1", stand.Options{Runtime: config.Rust, Rootless: true}).Boot()
	if out := use(t, s, d); out.Attached {
		t.Fatal("the stand-in is no trap")
	}
	isBreached(t, h, d, s, "rootless=true")
}

// TestTrap13StaleMarks: the marks of sandboxes that have died stay beside the record, and Kata's commands take the first.
func TestTrap13StaleMarks(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	killed, stopped := n.Start("a-killed", stand.Options{}).Boot(), n.Start("b-stopped", stand.Options{}).Boot()
	use(t, killed, d)
	has(t, h, d, killed)
	killed.Kill()
	if st := status(t, h, d); st.Sandbox != nil {
		t.Errorf("its shim is dead: %+v", st)
	}
	use(t, stopped, d)
	stopped.Stop()
	if st := status(t, h, d); st.Sandbox != nil {
		t.Errorf("both are dead: %+v", st)
	}
	living := n.Start("c-living", stand.Options{}).Boot()
	use(t, living, d)
	if id, _ := n.SandboxOf(d.TargetPath); id != killed.ID {
		t.Fatalf("the stand-in is no trap: first mark %q", id)
	}
	has(t, h, d, living)
	if err := h.Unstage(t.Context(), d.TargetPath); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(n.RecordDir(d.TargetPath)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its marks have kept the record: %v", err)
	}
}

// TestTrap14RustSocketBeforeGuest: the socket says nothing of the guest; errors close the connection; what there is of
// statistics is for people.
func TestTrap14RustSocketBeforeGuest(t *testing.T) {
	n := stand.New(t)
	endpoint, _ := n.ServeCRI()
	h := newHandler(t, n, kata.Config{CRIEndpoint: endpoint, ProofTimeout: now})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	s := n.Start("s1", stand.Options{Runtime: config.Rust, Pod: "u1"})
	st := status(t, h, d)
	if st.Sandbox == nil || st.Mounted || st.Breach != "" {
		t.Errorf("before the guest is up: %+v, want a sandbox and nothing more", st)
	}
	if stats, err := h.Stats(t.Context(), d.TargetPath, *st.Sandbox); !errdefs.IsUnavailable(err) {
		t.Errorf("stats before the guest is up: %+v, %v", stats, err)
	}
	s.Boot()
	use(t, s, d)
	stats, err := h.Stats(t.Context(), d.TargetPath, has(t, h, d, s))
	if err != nil || stats.Bytes.Total != d.SizeBytes/16*15 || stats.Inodes.Total != 1000 {
		t.Errorf("stats: %+v, %v", stats, err)
	}
}

// TestTrap16ResizeIsNotImplemented: on both runtimes, old and new; what a later Kata may do is used.
func TestTrap16ResizeIsNotImplemented(t *testing.T) {
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		for name, o := range map[string]stand.Options{"now": {}, "before 4.0": {OldAgent: true}, "later": {CanResize: true}} {
			t.Run(string(kind)+" "+name, func(t *testing.T) {
				n := stand.New(t)
				h := newHandler(t, n, kata.Config{HostAssist: []assist.Step{assist.Grow}})
				d := volume(t, n, "u1", "v1")
				mustStage(t, h, d)
				o.Runtime = kind
				s := n.Start("s1", o).Boot()
				use(t, s, d)
				sandbox := has(t, h, d, s)
				const grown = 256 << 20
				if err := os.Truncate(d.Device, grown); err != nil {
					t.Fatal(err)
				}
				size, err := h.Expand(t.Context(), d.TargetPath, sandbox, grown)
				if o.CanResize {
					if err != nil || size != grown {
						t.Errorf("expand: %d, %v", size, err)
					}
					return
				}
				if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "delete the pod") {
					t.Errorf("expand: %d, %v, want a plan", size, err)
				}
			})
		}
	}
	t.Run("one that lies", func(t *testing.T) {
		n := stand.New(t)
		h := newHandler(t, n, kata.Config{})
		d := volume(t, n, "u1", "v1")
		mustStage(t, h, d)
		s := n.Start("s1", stand.Options{CanResize: true, Guest: liar{&stand.Memory{}}}).Boot()
		use(t, s, d)
		if err := os.Truncate(d.Device, 256<<20); err != nil {
			t.Fatal(err)
		}
		if size, err := h.Expand(t.Context(), d.TargetPath, has(t, h, d, s), 256<<20); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("expand: %d, %v", size, err)
		}
	})
}

// liar says that it has resized.
type liar struct{ *stand.Memory }

func (liar) Resize(stand.Volume) error { return nil }

// TestTrap18Reboot: /run is emptied while the kubelet's directories stay.
func TestTrap18Reboot(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	use(t, n.Start("s1", stand.Options{}).Boot(), d)
	n.Reboot()
	if st := status(t, h, d); st.Sandbox != nil {
		t.Errorf("after a reboot: %+v", st)
	}
	h = newHandler(t, n, kata.Config{})
	if left, err := h.Sweep(t.Context(), []runtimehandler.Deferral{d}); err != nil || len(left) != 0 {
		t.Errorf("sweep: %+v, %v", left, err)
	}
	s := n.Start("s2", stand.Options{}).Boot()
	use(t, s, d)
	has(t, h, d, s)
}

// TestTrap19Policy: a confidential guest denies statistics, which says nothing of the volume.
func TestTrap19Policy(t *testing.T) {
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		n := stand.New(t)
		h := newHandler(t, n, kata.Config{})
		d := volume(t, n, "u1", "v1")
		mustStage(t, h, d)
		s := n.Start("s1", stand.Options{Runtime: kind, Policy: true}).Boot()
		use(t, s, d)
		_, err := h.Stats(t.Context(), d.TargetPath, has(t, h, d, s))
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "policy") {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

// TestWithoutTheContainerRuntime: if it does not answer, what Kata has left of itself is enough, and nothing is an error.
func TestWithoutTheContainerRuntime(t *testing.T) {
	n := stand.New(t)
	endpoint, stop := n.ServeCRI()
	stop()
	h := newHandler(t, n, kata.Config{CRIEndpoint: endpoint})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	if st, err := h.Status(t.Context(), d.TargetPath, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("nothing is known, and the status is %+v, %v", st, err)
	}
	s := n.Start("s1", stand.Options{NoBundle: true}).Boot()
	use(t, s, d)
	has(t, h, d, s)
}

// TestAContainerThatHasEnded: a sandbox goes on without the container that had the volume; that is no breach.
func TestAContainerThatHasEnded(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{ProofTimeout: now})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	s := n.Start("s1", stand.Options{}).Boot()
	use(t, s, d)
	has(t, h, d, s)
	if _, err := s.CreateContainer("other", stand.Mount{Source: n.Path("etc"), Destination: "/etc"}); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveContainer("c-" + s.ID); err != nil {
		t.Fatal(err)
	}
	if st := status(t, h, d); st.Mounted || st.Breach != "" || st.Sandbox == nil {
		t.Errorf("status %+v, want a sandbox that has not got it", st)
	}
}

// TestWhatIsNoSandbox: files among the directories of sandboxes, and marks that are no names of any.
func TestWhatIsNoSandbox(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	for _, dir := range []string{"run/kata", "run/vc/sbs"} {
		if err := os.MkdirAll(n.Path(dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{n.Path("run/kata/file"), filepath.Join(n.RecordDir(d.TargetPath), "file"), filepath.Join(n.RecordDir(d.TargetPath), "..x")} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if st := status(t, h, d); st.Sandbox != nil {
		t.Errorf("status %+v", st)
	}
}
