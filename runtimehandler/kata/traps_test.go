package kata_test

import (
	"context"
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
	for deadline := time.Now().Add(time.Minute); seen < 100; {
		if time.Now().After(deadline) {
			t.Fatalf("the record was seen %d times only", seen)
		}
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
