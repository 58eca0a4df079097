package deferrals_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/fake"
	"crust.dev/crust/test/priv"
)

// watching is a handler that finds sandboxes by itself, as it is told.
type watching struct {
	runtimehandler.Handler
	mu     sync.Mutex
	status runtimehandler.Status
}

func (w *watching) Status(context.Context, string, *runtimehandler.Sandbox) (runtimehandler.Status, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status, nil
}

func (w *watching) say(s runtimehandler.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.status = s
}

// disk is a storage with one device.
type disk struct{ deferral runtimehandler.Deferral }

func (d disk) Publish(context.Context) (runtimehandler.Deferral, error) { return d.deferral, nil }
func (d disk) Unpublish(context.Context, bool) error                    { return nil }

// TestBreach: the owner of the pod is told once, whoever asks is told as long as it lasts, and it ends with the proof.
func TestBreach(t *testing.T) {
	priv.Root(t)
	dir := t.TempDir()
	d := runtimehandler.Deferral{Driver: "d", VolumeID: "v", TargetPath: filepath.Join(dir, "pod", "mount"), Device: filepath.Join(dir, "disk"), FSType: "ext4"}
	if err := errors.Join(os.Mkdir(filepath.Dir(d.TargetPath), 0o750), os.WriteFile(d.Device, nil, 0o600), os.Truncate(d.Device, 1<<20)); err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(filepath.Join(dir, "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	h := &watching{Handler: fake.New("kata", runtimehandler.Capabilities{}).Handler()}
	var notices []deferrals.Notice
	m, err := deferrals.New(deferrals.Config{
		Journal: j, Handlers: []runtimehandler.Handler{h},
		StorageOf: func(context.Context, runtimehandler.Deferral) (deferrals.Storage, error) { return disk{d}, nil },
		Notify:    func(n deferrals.Notice) { notices = append(notices, n) },
	})
	if err != nil {
		t.Fatal(err)
	}
	pod := journal.Pod{UID: "u", Namespace: "ns", Name: "pod"}
	if err := m.Publish(t.Context(), deferrals.Request{Driver: "d", VolumeID: "v", TargetPath: d.TargetPath, Handler: "kata", Pod: pod}, disk{d}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := seal.Remove(d.TargetPath); err != nil {
			t.Error(err)
		}
	})

	kinds := func() (list []deferrals.Kind) {
		for _, f := range m.Reconcile(t.Context()) {
			list = append(list, f.Kind)
		}
		return list
	}
	sandbox := runtimehandler.Sandbox{ID: "s1", Runtime: "kata-go", Address: "/s1"}
	for _, step := range []struct {
		name      string
		status    runtimehandler.Status
		kinds     []deferrals.Kind
		reason    string // of a new notice
		unsettled bool
		stats     error
	}{
		{"the sandbox is there", runtimehandler.Status{Sandbox: &sandbox}, []deferrals.Kind{deferrals.Found}, "", true, deferrals.ErrNotMounted},
		{"still nothing more", runtimehandler.Status{Sandbox: &sandbox}, nil, "", true, deferrals.ErrNotMounted},
		{"its time is over", runtimehandler.Status{Sandbox: &sandbox, Breach: "why"}, []deferrals.Kind{deferrals.Breached}, "SandboxVolumeBreached", false, deferrals.ErrBreached},
		{"nobody has mended it", runtimehandler.Status{Sandbox: &sandbox, Breach: "why"}, []deferrals.Kind{deferrals.Breached}, "", false, deferrals.ErrBreached},
		{"the proof comes late", runtimehandler.Status{Sandbox: &sandbox, Mounted: true}, []deferrals.Kind{deferrals.Found}, "SandboxVolumeMounted", false, nil},
		{"all is well", runtimehandler.Status{Sandbox: &sandbox, Mounted: true}, nil, "", false, nil},
		{"the sandbox has gone", runtimehandler.Status{}, []deferrals.Kind{deferrals.Released}, "", false, deferrals.ErrNotMounted},
	} {
		h.say(step.status)
		notices = nil
		if diff := cmp.Diff(step.kinds, kinds()); diff != "" {
			t.Errorf("%s: findings: %s", step.name, diff)
		}
		if m.Unsettled() != step.unsettled {
			t.Errorf("%s: unsettled is %t", step.name, !step.unsettled)
		}
		if step.reason == "" && len(notices) > 0 || step.reason != "" && (len(notices) != 1 || notices[0].Reason != step.reason || notices[0].Pod != pod) {
			t.Errorf("%s: notices %+v, want %q", step.name, notices, step.reason)
		}
		_, err := m.Stats(t.Context(), d.TargetPath)
		if step.stats != nil && !errors.Is(err, step.stats) || step.stats == nil && !errdefs.IsNotFound(err) { // the fake has no sandbox
			t.Errorf("%s: stats: %v, want %v", step.name, err, step.stats)
		}
	}
}
