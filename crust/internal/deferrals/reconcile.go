package deferrals

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/runtimehandler"
)

// Kind says what a finding of Reconcile is about. The set is closed: it labels a metric.
type Kind string

// The kinds of findings.
const (
	Undone    Kind = "undone"    // a publish that a dead daemon had begun was taken back
	Finished  Kind = "finished"  // an unpublish or an expansion that was begun is finished
	Resealed  Kind = "resealed"  // a seal was renewed
	Dropped   Kind = "dropped"   // the record of something that is no longer there was dropped
	Released  Kind = "released"  // the volume of a sandbox that has ended was taken back
	Found     Kind = "found"     // a sandbox that does not register turned out to have the volume
	Breached  Kind = "breached"  // a sandbox runs without the volume that it should have mounted
	Orphaned  Kind = "orphaned"  // the pod is gone; its volume was taken back
	Left      Kind = "left"      // something is wrong and was left as it is
	Strangers Kind = "strangers" // there is something of somebody else's
)

// Finding is something that Reconcile has put right, or left.
type Finding struct {
	Kind     Kind   `json:"kind"`
	Path     string `json:"path"`
	VolumeID string `json:"volumeId,omitempty"`
	Text     string `json:"text"`
}

// Reconcile holds the records against the world and the world against the records. It finishes or undoes what was
// begun, takes back the volumes of sandboxes that have ended, renews seals and what handlers have staged, and takes back
// volumes whose pod is gone if nothing has their device open. What it cannot put right it leaves and reports. It can run
// at any time, beside everything else.
func (m *Manager) Reconcile(ctx context.Context) []Finding {
	findings := m.eachRecord(ctx, func(ctx context.Context, rec journal.Record) (todo, error) {
		t, err := m.plan(ctx, rec)
		if err != nil || t.act == nil {
			return t, err
		}
		return t, t.act(ctx)
	})
	for _, name := range slices.Sorted(maps.Keys(m.handlers)) {
		findings = append(findings, m.sweep(ctx, name)...)
	}
	return findings
}

// Inspect returns what Reconcile would find to do with the records now. It changes nothing.
func (m *Manager) Inspect(ctx context.Context) []Finding {
	return m.eachRecord(ctx, m.plan)
}

// eachRecord turns what fn says of each record into findings.
func (m *Manager) eachRecord(ctx context.Context, fn func(context.Context, journal.Record) (todo, error)) []Finding {
	var findings []Finding
	for _, rec := range m.journal.List(nil) {
		if ctx.Err() != nil {
			break
		}
		if f := m.oneRecord(ctx, rec.Deferral.TargetPath, fn); f != nil {
			findings = append(findings, *f)
		}
	}
	return findings
}

func (m *Manager) oneRecord(ctx context.Context, targetPath string, fn func(context.Context, journal.Record) (todo, error)) *Finding {
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	unlock, err := m.locks.Lock(ctx, targetPath)
	if err != nil {
		return nil // somebody is at work on it
	}
	defer unlock()
	rec, ok := m.journal.Get(targetPath)
	if !ok {
		return nil
	}
	t, err := fn(ctx, rec)
	finding := &Finding{Path: targetPath, VolumeID: rec.Deferral.VolumeID, Kind: t.kind, Text: t.text}
	switch {
	case err != nil:
		finding.Kind, finding.Text = Left, err.Error()
	case t.kind == "":
		return nil
	}
	return finding
}

// todo is what has to be done about a record; nothing if it has no kind.
type todo struct {
	kind Kind
	text string
	act  func(context.Context) error
}

// plan finds out what has to be done about a record. It changes nothing but, in memory, what it was given.
func (m *Manager) plan(ctx context.Context, rec journal.Record) (todo, error) {
	giveBack := func(ctx context.Context) error { return m.giveBack(ctx, rec) }
	switch {
	case rec.Host && onHost(rec.Deferral.TargetPath):
		return todo{}, nil
	case rec.Host:
		return todo{Dropped, "a host mount that is not there", func(context.Context) error { return m.dropStale(rec) }}, nil
	case rec.State == journal.Publishing:
		return todo{Undone, "its publication was interrupted", giveBack}, nil
	case rec.State == journal.Unpublishing:
		return todo{Finished, "its unpublication was interrupted", giveBack}, nil
	}
	if watched(rec) {
		if t, err := m.planWatched(ctx, rec); err != nil || t.kind != "" {
			return t, err
		}
	} else if released(rec) == nil {
		return m.planRelease(rec), nil
	}
	if orphaned(rec) {
		return todo{Orphaned, "its pod's directory is gone", giveBack}, unheld(rec.Deferral.Device, "its pod is gone, but it")
	}
	return m.planRenewal(rec)
}

func (m *Manager) planRelease(rec journal.Record) todo {
	return todo{Released, "its sandbox has ended", func(ctx context.Context) error { return m.release(ctx, rec) }}
}

// planWatched finds out what has become of a volume of which nobody tells.
func (m *Manager) planWatched(ctx context.Context, rec journal.Record) (todo, error) {
	status, err := m.status(ctx, rec)
	switch {
	case err != nil:
		return todo{}, err
	case status.Sandbox == nil && rec.Binding == nil:
		return todo{}, nil
	case status.Sandbox == nil:
		return m.planRelease(rec), released(rec)
	}
	bind := func(context.Context) error { return m.bind(rec, status) }
	if !news(rec, status) {
		bind = nil
	}
	switch {
	case status.Breach != "":
		return todo{Breached, status.Breach, bind}, nil
	case bind != nil:
		return todo{Found, "it is in sandbox " + status.Sandbox.ID, bind}, nil
	}
	return todo{}, nil
}

// planRenewal finds out what a reboot or a stranger has taken, and whether an expansion is to be finished.
func (m *Manager) planRenewal(rec journal.Record) (todo, error) {
	target := rec.Deferral.TargetPath
	intact, err := seal.Intact(target)
	if err != nil {
		return todo{}, err
	}
	if _, err := os.Lstat(filepath.Dir(target)); !intact && err == nil {
		return todo{Resealed, "its seal was gone", func(context.Context) error { return seal.Make(target) }}, nil
	}
	if rec.Expanding > 0 && rec.Binding != nil && rec.Binding.Mounted {
		return todo{Finished, "its expansion was interrupted", func(ctx context.Context) error {
			_, err := m.expandInside(ctx, rec)
			return err
		}}, nil
	}
	return todo{}, nil
}

// release forgets the sandbox of a volume, and does at once what else has to be done about it.
func (m *Manager) release(ctx context.Context, rec journal.Record) error {
	rec.Binding, rec.Expanding = nil, 0
	if err := m.journal.Put(nil, rec); err != nil {
		return err
	}
	t, err := m.plan(ctx, rec)
	if err != nil || t.act == nil {
		return err
	}
	return t.act(ctx)
}

// giveBack takes back a volume for which nobody calls.
func (m *Manager) giveBack(ctx context.Context, rec journal.Record) error {
	storage, err := m.storageOf(ctx, rec.Deferral)
	if err != nil {
		return fmt.Errorf("%s, and its driver does not answer: %w", rec.State, err)
	}
	if rec.State == journal.Published {
		return m.unpublish(ctx, rec, storage)
	}
	return m.takeBack(ctx, rec, storage)
}

// orphaned says that the kubelet has removed a target path, or the directory that it was in, without unpublishing: it
// does so for pods that it no longer knows. A volume that a sandbox holds is no orphan.
func orphaned(rec journal.Record) bool {
	if rec.Binding != nil {
		return false
	}
	_, err := os.Lstat(rec.Deferral.TargetPath)
	return errors.Is(err, os.ErrNotExist)
}

// sweep brings a handler's side in line with the records.
func (m *Manager) sweep(ctx context.Context, name string) []Finding {
	var staged []runtimehandler.Deferral
	for _, rec := range m.List() {
		if rec.Handler == name && rec.State == journal.Published {
			d := rec.Deferral
			d.Blankness = blankness(rec)
			staged = append(staged, d)
		}
	}
	left, err := m.handlers[name].Sweep(ctx, staged)
	if err != nil {
		left = append(left, runtimehandler.Leftover{Path: name, Text: err.Error()})
	}
	findings := make([]Finding, 0, len(left))
	for _, l := range left {
		kind := Left
		if l.Stranger {
			kind = Strangers
		}
		findings = append(findings, Finding{Kind: kind, Path: l.Path, Text: fmt.Sprintf("handler %s: %s", name, l.Text)})
	}
	return findings
}
