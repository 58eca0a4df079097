package kata_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	stand "crust.dev/crust/test/kata"
)

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
