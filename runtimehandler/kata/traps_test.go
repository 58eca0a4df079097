package kata_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
	stand "crust.dev/crust/test/kata"
	"crust.dev/crust/test/priv"
)

// The traps of Kata's direct volumes, one test each. Where a trap is the runtime's, the stand-in has it.

// now has every container's time for the proof over at once.
const now = time.Nanosecond

// volume makes a published volume of a pod, without a filesystem.
func volume(t *testing.T, n *stand.Node, pod, name string) runtimehandler.Deferral {
	t.Helper()
	target := n.Path("pods", pod, "volumes/kubernetes.io~csi", name, "mount")
	device := n.Path("images", name)
	for _, dir := range []string{target, filepath.Dir(device)} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	const size = 64 << 20
	if err := os.WriteFile(device, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(device, size); err != nil {
		t.Fatal(err)
	}
	return runtimehandler.Deferral{Driver: "d", VolumeID: name, TargetPath: target, Device: device, Serial: "s", SizeBytes: size, FSType: "ext4"}
}

func mustStage(t *testing.T, h *kata.Handler, d runtimehandler.Deferral) {
	t.Helper()
	if err := h.Stage(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}

// use has a sandbox make a container with a volume at /data.
func use(t *testing.T, s *stand.Sandbox, d runtimehandler.Deferral) stand.Outcome {
	t.Helper()
	out, err := s.CreateContainer("c-"+s.ID, stand.Mount{Source: d.TargetPath, Destination: "/data"})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func status(t *testing.T, h *kata.Handler, d runtimehandler.Deferral) runtimehandler.Status {
	t.Helper()
	st, err := h.Status(t.Context(), d.TargetPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// isBreached checks that a deferral is breached in a sandbox, for a reason.
func isBreached(t *testing.T, h *kata.Handler, d runtimehandler.Deferral, s *stand.Sandbox, reason string) {
	t.Helper()
	st := status(t, h, d)
	if st.Sandbox == nil || st.Sandbox.ID != s.ID || st.Mounted || !strings.Contains(st.Breach, reason) {
		t.Errorf("status %+v, want a breach in %s that says %q", st, s.ID, reason)
	}
}

func has(t *testing.T, h *kata.Handler, d runtimehandler.Deferral, s *stand.Sandbox) runtimehandler.Sandbox {
	t.Helper()
	st := status(t, h, d)
	if st.Sandbox == nil || st.Sandbox.ID != s.ID || !st.Mounted || st.Breach != "" {
		t.Fatalf("status %+v, want it mounted in %s", st, s.ID)
	}
	return *st.Sandbox
}

// TestTrap01DisableBlockDeviceUse: the Go runtime since 3.26 ignores the record by default, and the pod would write to the
// node's directory.
func TestTrap01DisableBlockDeviceUse(t *testing.T) {
	for name, viaCRI := range map[string]bool{"seen in the bundles": false, "seen by CRI": true} {
		t.Run(name, func(t *testing.T) {
			n := stand.New(t)
			c := kata.Config{ProofTimeout: now}
			if viaCRI {
				c.CRIEndpoint, _ = n.ServeCRI()
			}
			h := newHandler(t, n, c)
			d := volume(t, n, "u1", "v1")
			mustStage(t, h, d)
			s := n.Start("s1", stand.Options{DisableBlockDevices: true, Pod: "u1", NoBundle: viaCRI}).Boot()
			if out := use(t, s, d); out.Attached {
				t.Fatal("the stand-in is no trap")
			}
			isBreached(t, h, d, s, "disable_block_device_use=false")
		})
	}
	t.Run("but it has time", func(t *testing.T) {
		n := stand.New(t)
		h := newHandler(t, n, kata.Config{})
		d := volume(t, n, "u1", "v1")
		mustStage(t, h, d)
		use(t, n.Start("s1", stand.Options{DisableBlockDevices: true}).Boot(), d)
		if st := status(t, h, d); st.Breach != "" || st.Mounted || st.Sandbox == nil {
			t.Errorf("status %+v, want a sandbox that has still time", st)
		}
	})
}

// TestTrap02RecordGoneIsSilentOnGo: without a valid record the Go runtime shares the directory, and runtime-rs fails. Both
// are noticed, and Sweep puts the record back.
func TestTrap02RecordGoneIsSilentOnGo(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{ProofTimeout: now})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	if err := os.RemoveAll(n.RecordDir(d.TargetPath)); err != nil {
		t.Fatal(err)
	}
	s := n.Start("s1", stand.Options{}).Boot()
	if out := use(t, s, d); out.Attached {
		t.Fatal("the stand-in is no trap")
	}
	if _, err := h.Sweep(t.Context(), []runtimehandler.Deferral{d}); err != nil {
		t.Fatal(err)
	}
	isBreached(t, h, d, s, "has not read the record")
	if out := use(t, s, d); !out.Attached { // the container is made again
		t.Error("with the record back, the volume is not attached")
	}
	has(t, h, d, s)
}

// TestTrap03NoEmptyDirectory: a record's directory that is empty keeps runtime-rs from making containers. None is ever
// seen, also while records come and go.
func TestTrap03NoEmptyDirectory(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	if err := os.MkdirAll(n.RecordDir(d.TargetPath), 0o700); err != nil { // somebody's
		t.Fatal(err)
	}
	left, err := h.Sweep(t.Context(), nil)
	if err != nil || len(left) != 1 || !strings.Contains(left[0].Text, "runtime-rs") {
		t.Errorf("sweep: %+v, %v", left, err)
	}
	mustStage(t, h, d)
	s := n.Start("s1", stand.Options{Runtime: config.Rust}).Boot()
	use(t, s, d)
	s.Stop()

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			other := d
			other.MountFlags = [][]string{nil, {"noatime"}}[i%2]
			if err := errors.Join(h.Stage(t.Context(), other), h.Unstage(t.Context(), d.TargetPath)); err != nil {
				t.Error(err)
			}
		}
	}()
	seen := 0
	for range 2000 {
		dir, err := os.Open(n.RecordDir(d.TargetPath))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		names, err := dir.Readdirnames(-1)
		was, statErr := dir.Stat()
		is, err2 := os.Lstat(n.RecordDir(d.TargetPath))
		_ = dir.Close()
		// What is still at its name now was there while it was read.
		if err != nil || statErr != nil || err2 != nil || !os.SameFile(was, is) {
			continue
		}
		seen++
		if diff := cmp.Diff([]string{"mountInfo.json"}, names); diff != "" {
			t.Fatalf("in the record's directory: %s", diff)
		}
	}
	if seen == 0 {
		t.Error("the record was never seen")
	}
	cancel()
	<-done
}

// TestTrap04NoStrayNames: Kata's commands take any file beside the record for a sandbox, and azuredisk fails for any name
// that is no record.
func TestTrap04NoStrayNames(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{Runtime: config.Go})
	group := uint32(7)
	a, b := volume(t, n, "u1", "v1"), volume(t, n, "u2", "v2")
	a.Group, a.MountFlags, a.ReadOnly = &group, []string{"noatime"}, false
	for _, d := range []runtimehandler.Deferral{a, b, a} {
		mustStage(t, h, d)
	}
	all, err := n.Scan()
	if err != nil || len(all) != 2 {
		t.Fatalf("azuredisk finds %+v, %v", all, err)
	}
	if _, err := n.SandboxOf(a.TargetPath); err == nil {
		t.Error("Kata's command finds a sandbox where there is none")
	}
	s := n.Start("s1", stand.Options{}).Boot()
	use(t, s, a)
	if id, err := n.SandboxOf(a.TargetPath); err != nil || id != s.ID {
		t.Errorf("Kata's command finds %q, %v", id, err)
	}
	if err := os.WriteFile(filepath.Join(n.Records(), "notes.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	left, err := h.Sweep(t.Context(), []runtimehandler.Deferral{a, b})
	if err != nil || len(left) != 1 || !strings.Contains(left[0].Text, "base64url") || !left[0].Stranger {
		t.Errorf("sweep: %+v, %v", left, err)
	}
}

// TestTrap05RecordOutlivesRestarts: a container that is made again reads the record again.
func TestTrap05RecordOutlivesRestarts(t *testing.T) {
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		n := stand.New(t)
		h := newHandler(t, n, kata.Config{})
		d := volume(t, n, "u1", "v1")
		mustStage(t, h, d)
		s := n.Start("s1", stand.Options{Runtime: kind}).Boot()
		for range 3 {
			if out := use(t, s, d); !out.Attached {
				t.Errorf("%s: the container has lost the volume", kind)
			}
			has(t, h, d, s)
			mustStage(t, h, d)
			if _, err := h.Sweep(t.Context(), []runtimehandler.Deferral{d}); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestTrap06OneForm: what both runtimes take, with all keys.
func TestTrap06OneForm(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	raw, err := os.ReadFile(filepath.Join(n.RecordDir(d.TargetPath), "mountInfo.json"))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"volume-type":"directvol","device":"` + d.Device + `","fstype":"ext4","metadata":{"crust.dev/handler":"kata"},"options":[]}` + "\n"
	if diff := cmp.Diff(want, string(raw)); diff != "" {
		t.Error(diff)
	}
	byGo, errGo := stand.ParseGo(raw)
	byRust, errRust := stand.ParseRust(raw)
	if diff := cmp.Diff(byGo, byRust); diff != "" || errGo != nil || errRust != nil {
		t.Errorf("the runtimes read it differently: %v, %v\n%s", errGo, errRust, diff)
	}
}

// TestTrap07Options: bind breaks the Go runtime and loop the agent; read-only has to be said in the options.
func TestTrap07Options(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	for name, tc := range map[string]struct {
		flags    []string
		fsType   string
		readOnly bool
		want     []string // nil: refused
	}{
		"none":                    {nil, "ext4", false, []string{}},
		"those of the filesystem": {[]string{"noatime,nodiratime", `context="a,b"`}, "ext4", false, []string{"noatime", "nodiratime", `context="a,b"`}},
		"those of fstab":          {[]string{"defaults", "_netdev,nofail", "x-systemd.automount", "rw", "discard"}, "ext4", false, []string{"discard"}},
		"read-only by request":    {[]string{"noatime"}, "ext4", true, []string{"noatime", "ro"}},
		"read-only by option":     {[]string{"ro,noatime"}, "ext4", false, []string{"noatime", "ro"}},
		"xfs":                     {[]string{"noatime"}, "xfs", false, []string{"noatime", "nouuid"}},
		"bind":                    {[]string{"bind", "rw"}, "ext4", false, nil},
		"rbind":                   {[]string{"noatime,rbind"}, "ext4", false, nil},
		"loop":                    {[]string{"loop"}, "ext4", false, nil},
		"loop with a value":       {[]string{"loop=/dev/loop1"}, "ext4", false, nil},
		"another filesystem":      {nil, "btrfs", false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			d := volume(t, n, "u1", strings.ReplaceAll(name, " ", "-"))
			d.MountFlags, d.FSType, d.ReadOnly = tc.flags, tc.fsType, tc.readOnly
			err := h.Stage(t.Context(), d)
			if tc.want == nil {
				if !errdefs.IsInvalidArgument(err) {
					t.Errorf("stage: %v, want ErrInvalidArgument", err)
				}
				return
			}
			all, scanErr := n.Scan()
			if diff := cmp.Diff(tc.want, all[d.TargetPath].Options); err != nil || scanErr != nil || diff != "" {
				t.Errorf("%v, %v\n%s", err, scanErr, diff)
			}
		})
	}
}

// TestTrap08NeverCreateFilesystem: Kata's agent formats without looking. A blank volume is refused, or formatted here.
func TestTrap08NeverCreateFilesystem(t *testing.T) {
	n := stand.New(t)
	d := volume(t, n, "u1", "v1")
	d.Format, d.Blankness = true, runtimehandler.BlanknessNeverWritten
	err := newHandler(t, n, kata.Config{}).Stage(t.Context(), d)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `add "format" to hostAssist`) {
		t.Errorf("stage: %v", err)
	}
	if _, err := os.Stat(n.RecordDir(d.TargetPath)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is a record: %v", err)
	}
	priv.Root(t)
	mustStage(t, newHandler(t, n, kata.Config{HostAssist: []assist.Step{assist.Format}}), d)
	all, err := n.Scan()
	if info := all[d.TargetPath]; err != nil || info.Metadata["crust.dev/host-assist"] != "format" || info.Metadata["createFilesystem"] != "" {
		t.Errorf("record %+v, %v", info, err)
	}
}

// TestTrap09FSGroup: the Go runtime takes fsGroup from the record, but not 0; runtime-rs loses it.
func TestTrap09FSGroup(t *testing.T) {
	n := stand.New(t)
	for name, tc := range map[string]struct {
		runtime config.Runtime
		group   uint32
		policy  runtimehandler.GroupChangePolicy
		want    map[string]string // nil: refused
	}{
		"the Go runtime":                  {config.Go, 2000, runtimehandler.GroupChangeAlways, map[string]string{"fsGroup": "2000", "fsGroupChangePolicy": "Always"}},
		"the Go runtime, on a mismatch":   {config.Go, 4294967294, runtimehandler.GroupChangeOnRootMismatch, map[string]string{"fsGroup": "4294967294", "fsGroupChangePolicy": "OnRootMismatch"}},
		"the Go runtime and root":         {config.Go, 0, runtimehandler.GroupChangeAlways, nil},
		"runtime-rs":                      {config.Rust, 2000, runtimehandler.GroupChangeAlways, nil},
		"a handler for whatever there is": {"", 2000, runtimehandler.GroupChangeAlways, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHandler(t, n, kata.Config{Runtime: tc.runtime})
			d := volume(t, n, "u1", strings.ReplaceAll(name, " ", "-"))
			d.Group, d.GroupChangePolicy = &tc.group, tc.policy
			err := h.Stage(t.Context(), d)
			if tc.want == nil {
				if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `add "chown" to hostAssist`) {
					t.Errorf("stage: %v", err)
				}
				return
			}
			tc.want["crust.dev/handler"] = "kata"
			all, scanErr := n.Scan()
			if diff := cmp.Diff(tc.want, all[d.TargetPath].Metadata); err != nil || scanErr != nil || diff != "" {
				t.Errorf("%v, %v\n%s", err, scanErr, diff)
			}
		})
	}
}

// TestTrap10KeyIsResolvedAndShort: the container runtime resolves symbolic links, and a file name has 255 bytes.
func TestTrap10KeyIsResolvedAndShort(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	real := d.TargetPath
	if err := os.Symlink(n.Path("pods"), n.Path("link")); err != nil {
		t.Fatal(err)
	}
	d.TargetPath = strings.Replace(real, "/pods/", "/link/", 1)
	mustStage(t, h, d)
	if _, err := os.Stat(n.RecordDir(real)); err != nil {
		t.Errorf("under the resolved path: %v", err)
	}
	if err := os.RemoveAll(real); err != nil { // the kubelet is faster
		t.Fatal(err)
	}
	if err := h.Unstage(t.Context(), d.TargetPath); err != nil {
		t.Error(err)
	}
	if all, err := n.Scan(); err != nil || len(all) != 0 {
		t.Errorf("left: %+v, %v", all, err)
	}

	for length, fits := range map[int]bool{189: true, 190: false} {
		base := n.Path("pods/u9/volumes/kubernetes.io~csi/") + "/"
		d := volume(t, n, "u9", strings.Repeat("p", length-len(base)-len("/mount")))
		if len(d.TargetPath) != length {
			t.Fatalf("the path has %d bytes", len(d.TargetPath))
		}
		err := h.Stage(t.Context(), d)
		if fits && err != nil || !fits && (!errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "1 bytes shorter")) {
			t.Errorf("%d bytes: %v", length, err)
		}
		if err := h.Unstage(t.Context(), d.TargetPath); err != nil {
			t.Errorf("unstage %d bytes: %v", length, err)
		}
		if _, err := h.Status(t.Context(), d.TargetPath, nil); err != nil {
			t.Errorf("status of %d bytes: %v", length, err)
		}
	}
}

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

// TestLeftoversOfOthers: another driver's record is never changed, and our handlers leave each other alone.
func TestLeftoversOfOthers(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	theirs, _ := json.Marshal(stand.Info{VolumeType: "directvol", Device: "/dev/sdf", FSType: "ext4", Metadata: map[string]string{"azure.csi.disk/volume-id": "x"}})
	for _, dir := range []string{n.RecordDir(d.TargetPath), n.RecordDir("/elsewhere")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "mountInfo.json"), theirs, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Stage(t.Context(), d); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("stage over another's record: %v", err)
	}
	if err := h.Unstage(t.Context(), d.TargetPath); err != nil {
		t.Error(err)
	}
	other := newHandler(t, n, kata.Config{Name: "kata-rs", Runtime: config.Rust})
	e := volume(t, n, "u2", "v2")
	mustStage(t, other, e)
	if left, err := h.Sweep(t.Context(), nil); err != nil || len(left) != 0 {
		t.Errorf("sweep: %+v, %v", left, err)
	}
	all, err := n.Scan()
	if err != nil || len(all) != 3 {
		t.Errorf("records: %+v, %v", all, err)
	}
	for _, source := range []string{d.TargetPath, "/elsewhere"} {
		if raw, err := os.ReadFile(filepath.Join(n.Records(), base64.URLEncoding.EncodeToString([]byte(source)), "mountInfo.json")); err != nil || string(raw) != string(theirs) {
			t.Errorf("their record is now %q, %v", raw, err)
		}
	}
}

// TestScratchIsEmptied: what a process that was killed has left in the scratch directory goes.
func TestScratchIsEmptied(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	scratch := n.Path("run/kata-containers/shared/crust-scratch-kata/x")
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Sweep(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
}

// TestSweepDoesNotOverruleWhatIsNewer: the list that Sweep gets may be older than a Stage or an Unstage.
func TestSweepDoesNotOverruleWhatIsNewer(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	a, b := volume(t, n, "u1", "v1"), volume(t, n, "u2", "v2")
	mustStage(t, h, b)
	if err := h.Unstage(t.Context(), b.TargetPath); err != nil {
		t.Fatal(err)
	}
	mustStage(t, h, a)
	if _, err := h.Sweep(t.Context(), []runtimehandler.Deferral{b}); err != nil {
		t.Fatal(err)
	}
	all, err := n.Scan()
	if _, ok := all[a.TargetPath]; err != nil || !ok || len(all) != 1 {
		t.Errorf("after a sweep with an old list: %+v, %v", all, err)
	}
}
