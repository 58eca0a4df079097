package kata_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/config"
	stand "crust.dev/crust/test/kata"
)

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
