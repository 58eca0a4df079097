package deferrals

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// Bound notes that a sandbox has mounted a volume that it had claimed. From its success on the volume counts as holding
// data. ErrFailedPrecondition if the sandbox does not hold the volume.
func (m *Manager) Bound(ctx context.Context, sandboxID, targetPath string) error {
	return m.change(ctx, targetPath, func(rec *journal.Record) error {
		if rec == nil || rec.Binding == nil || rec.Binding.Sandbox.ID != sandboxID {
			return fmt.Errorf("sandbox %s has not claimed a volume at %s: %w", sandboxID, targetPath, errdefs.ErrFailedPrecondition)
		}
		rec.Mounted, rec.Binding.Mounted = true, true
		m.notify(Notice{Pod: rec.Pod, Reason: "SandboxVolumeMounted", Message: fmt.Sprintf("volume %s is mounted inside sandbox %s", rec.Deferral.VolumeID, sandboxID)})
		return nil
	})
}

// Released notes that a sandbox has let go of a volume's device. It succeeds if the sandbox does not hold it.
func (m *Manager) Released(ctx context.Context, sandboxID, targetPath string) error {
	return m.change(ctx, targetPath, func(rec *journal.Record) error {
		if rec != nil && rec.Binding != nil && rec.Binding.Sandbox.ID == sandboxID {
			rec.Binding, rec.Expanding = nil, 0
		}
		return nil
	})
}

// SandboxGone takes back the volumes of a sandbox that may have ended without a word. Volumes that somebody may still
// write to stay bound, and the error says why.
func (m *Manager) SandboxGone(ctx context.Context, sandboxID string) error {
	var errs []error
	for _, held := range m.heldBy(sandboxID) {
		errs = append(errs, m.change(ctx, held.Deferral.TargetPath, func(rec *journal.Record) error {
			if rec == nil || rec.Binding == nil || rec.Binding.Sandbox.ID != sandboxID {
				return nil
			}
			if err := released(*rec); err != nil {
				return err
			}
			rec.Binding, rec.Expanding = nil, 0
			return nil
		}))
	}
	return errors.Join(errs...)
}

func (m *Manager) heldBy(sandboxID string) []journal.Record {
	return m.journal.List(func(r journal.Record) bool { return r.Binding != nil && r.Binding.Sandbox.ID == sandboxID })
}

// change applies a change to the record at a target path under its lock and makes it durable. fn gets nil if there is
// no record.
func (m *Manager) change(ctx context.Context, targetPath string, fn func(*journal.Record) error) error {
	unlock, err := m.locks.Lock(ctx, targetPath)
	if err != nil {
		return err
	}
	defer unlock()
	rec, ok := m.journal.Get(targetPath)
	if !ok {
		return fn(nil)
	}
	if err := fn(&rec); err != nil {
		return err
	}
	if err := m.journal.Put(nil, rec); err != nil {
		return err
	}
	crashpoint.At(ctx, "change: committed")
	return nil
}
