package kata_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	stand "crust.dev/crust/test/kata"
	"crust.dev/crust/test/priv"
)

// formatted makes a volume with an ext4 filesystem of size bytes.
func formatted(t *testing.T, n *stand.Node, pod, name string, options ...string) runtimehandler.Deferral {
	t.Helper()
	d := volume(t, n, pod, name)
	argv := append([]string{"-q", "-F"}, append(options, d.Device)...)
	if out, err := exec.Command("mkfs.ext4", argv...).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v\n%s", err, out)
	}
	return d
}

func noted(t *testing.T, n *stand.Node, d runtimehandler.Deferral) string {
	t.Helper()
	all, err := n.Scan()
	if err != nil {
		t.Fatal(err)
	}
	return all[d.TargetPath].Metadata["crust.dev/host-assist"]
}

// TestTrap20ChownIsDoneBefore: a walk over many files inside CreateContainer can take longer than Kata waits. With chown
// assistance it is over before, and the agent is told nothing.
func TestTrap20ChownIsDoneBefore(t *testing.T) {
	priv.Root(t)
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{HostAssist: []assist.Step{assist.Chown}})
	for _, group := range []uint32{0, 4711} {
		d := formatted(t, n, "u1", fmt.Sprint("v", group))
		d.Group = &group
		mustStage(t, h, d)
		all, err := n.Scan()
		if info := all[d.TargetPath]; err != nil || info.Metadata["fsGroup"] != "" || info.Metadata["crust.dev/host-assist"] != "chown" {
			t.Errorf("group %d: %+v, %v", group, info, err)
		}
		out, err := exec.Command("debugfs", "-R", "stat /", d.Device).Output()
		if err != nil || !strings.Contains(string(out), fmt.Sprintf("Group: %5d", group)) {
			t.Errorf("group %d: its root is %v\n%s", group, err, out)
		}
	}
}

// TestStepsThatAreNotAllowed: each says what it is for, and how it is allowed.
func TestStepsThatAreNotAllowed(t *testing.T) {
	priv.Root(t)
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	small := formatted(t, n, "u1", "small")
	small.SizeBytes *= 4
	if err := os.Truncate(small.Device, small.SizeBytes); err != nil {
		t.Fatal(err)
	}
	ill := formatted(t, n, "u1", "ill", "-O", "^metadata_csum")
	if out, err := exec.Command("debugfs", "-w", "-R", "ssv state 2", ill.Device).CombinedOutput(); err != nil {
		t.Fatalf("debugfs: %v\n%s", err, out)
	}
	for step, d := range map[assist.Step]runtimehandler.Deferral{assist.Grow: small, assist.Check: ill} {
		err := h.Stage(t.Context(), d)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), fmt.Sprintf("add %q to hostAssist of handler kata", step)) || !strings.Contains(err.Error(), d.VolumeID) {
			t.Errorf("%s: %v", step, err)
		}
		able := newHandler(t, n, kata.Config{HostAssist: []assist.Step{step}})
		mustStage(t, able, d)
		if got := noted(t, n, d); got != string(step) {
			t.Errorf("%s: the record says %q", step, got)
		}
		if found, err := assist.Look(d.Device); err != nil || found.Errors || found.Smaller(d.SizeBytes) {
			t.Errorf("%s: afterwards %+v, %v", step, found, err)
		}
	}
}

// TestADeviceThatGrowsBeforeItsSandbox: the daemon stages again, and the record is there afterwards, as it was or better.
func TestADeviceThatGrowsBeforeItsSandbox(t *testing.T) {
	priv.Root(t)
	n := stand.New(t)
	d := formatted(t, n, "u1", "v1")
	plain, able := newHandler(t, n, kata.Config{}), newHandler(t, n, kata.Config{HostAssist: []assist.Step{assist.Check, assist.Grow}})
	mustStage(t, able, d)
	d.SizeBytes *= 4
	if err := os.Truncate(d.Device, d.SizeBytes); err != nil {
		t.Fatal(err)
	}
	if err := plain.Stage(t.Context(), d); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without permission: %v", err)
	}
	if got := noted(t, n, d); got != "check" {
		t.Errorf("the record says %q", got)
	}
	mustStage(t, able, d)
	if got := noted(t, n, d); got != "check,grow" {
		t.Errorf("the record says %q", got)
	}
}

// TestNoWorkOnAVolumeInUse: the host does not touch what a sandbox has, and does not take its record either.
func TestNoWorkOnAVolumeInUse(t *testing.T) {
	priv.Root(t)
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{HostAssist: []assist.Step{assist.Grow}})
	d := formatted(t, n, "u1", "v1")
	mustStage(t, h, d)
	s := n.Start("s1", stand.Options{}).Boot()
	use(t, s, d)
	d.SizeBytes *= 4
	if err := os.Truncate(d.Device, d.SizeBytes); err != nil {
		t.Fatal(err)
	}
	if err := h.Stage(t.Context(), d); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), s.ID) {
		t.Errorf("stage: %v", err)
	}
	if found, err := assist.Look(d.Device); err != nil || !found.Smaller(d.SizeBytes) {
		t.Errorf("it was touched: %+v, %v", found, err)
	}
	has(t, h, d, s)
}
