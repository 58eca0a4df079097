package deferrals

import (
	"context"
	"fmt"
	"time"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/runtimehandler"
)

// discover asks the handler where a volume is, if no sandbox has claimed it: some runtimes do not tell, and have to be
// looked after. What is found is made durable before anybody acts on it.
func (m *Manager) discover(ctx context.Context, rec journal.Record) (journal.Record, error) {
	if rec.Binding != nil || rec.State != journal.Published {
		return rec, nil
	}
	status, err := m.status(ctx, rec)
	if err != nil || status.Sandbox == nil {
		return rec, err
	}
	if err := m.bind(rec, status); err != nil {
		return rec, err
	}
	rec, _ = m.journal.Get(rec.Deferral.TargetPath)
	return rec, nil
}

// status asks the handler of a volume that no sandbox has claimed.
func (m *Manager) status(ctx context.Context, rec journal.Record) (runtimehandler.Status, error) {
	handler, err := m.handler(rec.Handler)
	if err != nil {
		return runtimehandler.Status{}, err
	}
	status, err := handler.Status(ctx, rec.Deferral.TargetPath, nil)
	if err != nil {
		return runtimehandler.Status{}, fmt.Errorf("handler %s: status of %s: %w", rec.Handler, rec.Deferral.TargetPath, err)
	}
	return status, nil
}

// bind notes that a handler has found a volume in a sandbox.
func (m *Manager) bind(rec journal.Record, status runtimehandler.Status) error {
	rec.Claimed = true
	rec.Mounted = rec.Mounted || status.Mounted
	rec.Binding = &journal.Binding{Sandbox: *status.Sandbox, Mounted: status.Mounted, Since: time.Now().UTC()}
	return m.journal.Put(nil, rec)
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
