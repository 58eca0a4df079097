package deferrals

import (
	"context"
	"fmt"
	"time"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/runtimehandler"
)

// watched says that nobody tells what becomes of a volume: no sandbox has claimed it, or its handler has found the sandbox
// by itself. It has to be looked after.
func watched(rec journal.Record) bool { return rec.Binding == nil || len(rec.Binding.Processes) == 0 }

// discover asks the handler where a volume is, unless that is known: some runtimes do not tell, and have to be looked
// after. What is found is made durable before anybody acts on it. That a sandbox has gone is for Reconcile to find out.
func (m *Manager) discover(ctx context.Context, rec journal.Record) (journal.Record, error) {
	if rec.State != journal.Published || !watched(rec) || rec.Binding != nil && rec.Binding.Mounted {
		return rec, nil
	}
	status, err := m.status(ctx, rec)
	if err != nil || status.Sandbox == nil || !news(rec, status) {
		return rec, err
	}
	if err := m.bind(rec, status); err != nil {
		return rec, err
	}
	rec, _ = m.journal.Get(rec.Deferral.TargetPath)
	return rec, nil
}

// status asks the handler of a volume that is watched.
func (m *Manager) status(ctx context.Context, rec journal.Record) (runtimehandler.Status, error) {
	handler, err := m.handler(rec.Handler)
	if err != nil {
		return runtimehandler.Status{}, err
	}
	var sandbox *runtimehandler.Sandbox
	if rec.Binding != nil {
		sandbox = &rec.Binding.Sandbox
	}
	status, err := handler.Status(ctx, rec.Deferral.TargetPath, sandbox)
	if err != nil {
		return runtimehandler.Status{}, fmt.Errorf("handler %s: status of %s: %w", rec.Handler, rec.Deferral.TargetPath, err)
	}
	return status, nil
}

// news says whether a handler has found a sandbox other than the record says, or in another state.
func news(rec journal.Record, status runtimehandler.Status) bool {
	b := rec.Binding
	return b == nil || b.Sandbox != *status.Sandbox || b.Mounted != status.Mounted || (b.Breach == "") != (status.Breach == "")
}

// bind notes that a handler has found a volume in a sandbox, or a sandbox that should have it.
func (m *Manager) bind(rec journal.Record, status runtimehandler.Status) error {
	before := rec.Binding
	rec.Claimed = true
	rec.Mounted = rec.Mounted || status.Mounted
	rec.Binding = &journal.Binding{Sandbox: *status.Sandbox, Mounted: status.Mounted, Breach: status.Breach, Since: time.Now().UTC()}
	if before != nil && before.Sandbox == *status.Sandbox {
		rec.Binding.Since = before.Since
	}
	if err := m.journal.Put(nil, rec); err != nil {
		return err
	}
	switch {
	case status.Breach != "":
		m.notify(Notice{Pod: rec.Pod, Warning: true, Reason: "SandboxVolumeBreached", Message: breached(rec)})
	case status.Mounted:
		m.notify(Notice{Pod: rec.Pod, Reason: "SandboxVolumeMounted", Message: fmt.Sprintf("volume %s is mounted inside sandbox %s", rec.Deferral.VolumeID, status.Sandbox.ID)})
	}
	return nil
}

// breached says what is wrong with a breached deferral.
func breached(rec journal.Record) string {
	return fmt.Sprintf("volume %s is not in its sandbox: %s", rec.Deferral.VolumeID, rec.Binding.Breach)
}

// Unsettled says whether a sandbox that does not tell is about to mount a volume, so that it is worth looking soon.
func (m *Manager) Unsettled() bool {
	return len(m.journal.List(func(r journal.Record) bool {
		return r.Binding != nil && watched(r) && !r.Binding.Mounted && r.Binding.Breach == ""
	})) > 0
}

// discoverOne is discover for a caller that has no lock.
func (m *Manager) discoverOne(ctx context.Context, targetPath string) error {
	unlock, err := m.locks.Lock(ctx, targetPath)
	if err != nil {
		return err
	}
	defer unlock()
	rec, ok := m.journal.Get(targetPath)
	if !ok || rec.Host {
		return nil
	}
	_, err = m.discover(ctx, rec)
	return err
}
