package deferrals

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/process"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// Unpublish takes a volume back. It is ErrFailedPrecondition, and nothing has happened, while a sandbox may still use
// the device; ErrNotFound for a target path that is not a deferral's. After any other error it has to be called again.
func (m *Manager) Unpublish(ctx context.Context, targetPath string, storage Storage) error {
	unlock, err := m.locks.Lock(ctx, targetPath)
	if err != nil {
		return err
	}
	defer unlock()

	rec, ok := m.journal.Get(targetPath)
	if !ok || rec.Host {
		return fmt.Errorf("no deferral is published at %s: %w", targetPath, errdefs.ErrNotFound)
	}
	if rec, err = m.discover(ctx, rec); err != nil {
		return err
	}
	if err := released(rec); err != nil {
		return err
	}
	return m.unpublish(ctx, rec, storage)
}

// unpublish takes back a volume that nobody holds.
func (m *Manager) unpublish(ctx context.Context, rec journal.Record, storage Storage) error {
	rec.State, rec.Binding, rec.Expanding = journal.Unpublishing, nil, 0
	if err := m.journal.Put(nil, rec); err != nil {
		return err
	}
	crashpoint.At(ctx, "unpublish: intended")
	return m.takeBack(ctx, rec, storage)
}

// released returns nil if nobody can use the device of a record any more.
func released(rec journal.Record) error {
	if rec.Binding == nil {
		return nil
	}
	sandbox := rec.Binding.Sandbox
	for _, p := range rec.Binding.Processes {
		alive, err := p.Alive()
		if err != nil {
			return fmt.Errorf("cannot tell whether sandbox %s still holds volume %s: %w: %w", sandbox.ID, rec.Deferral.VolumeID, err, errdefs.ErrUnavailable)
		}
		if alive {
			return fmt.Errorf("volume %s is held by sandbox %s (%s, pid %s); stop the sandbox first: %w",
				rec.Deferral.VolumeID, sandbox.ID, sandbox.Runtime, p, errdefs.ErrFailedPrecondition)
		}
	}
	// All of its processes are gone without a word, or they were never known. Whoever has the device open may still
	// write to it.
	return unheld(rec.Deferral.Device, fmt.Sprintf("volume %s was in sandbox %s and", rec.Deferral.VolumeID, sandbox.ID))
}

// unheld is ErrFailedPrecondition if anything on this node has a device open. what begins the sentence.
func unheld(device, what string) error {
	holders, err := process.Holders(device)
	if err != nil {
		return fmt.Errorf("cannot tell whether device %s is in use: %w: %w", device, err, errdefs.ErrUnavailable)
	}
	if len(holders) == 0 {
		return nil
	}
	names := make([]string, len(holders))
	for i, h := range holders {
		names[i] = h.String()
	}
	return fmt.Errorf("%s is still open in %s (device %s); end that first: %w", what, strings.Join(names, ", "), device, errdefs.ErrFailedPrecondition)
}
