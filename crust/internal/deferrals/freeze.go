package deferrals

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
)

// thawTimeout bounds one thaw. The guest thaws by itself, so a sandbox that does not answer is not waited for longer.
const thawTimeout = 10 * time.Second

// Freeze makes the filesystems of several volumes of one driver consistent inside their sandboxes and holds back their
// writers: of all that a sandbox has mounted, or of none. It returns the ids of those that are frozen, which have to be
// thawed, and of those that no sandbox has mounted for writing. A freeze ends by itself after limit. Errors are those of
// the handlers.
func (m *Manager) Freeze(ctx context.Context, driver string, volumeIDs []string, limit time.Duration) (frozen, notMounted []string, err error) {
	var targets []journal.Record
	for _, id := range volumeIDs {
		if rec, ok := m.writer(driver, id); ok {
			targets = append(targets, rec)
		} else {
			notMounted = append(notMounted, id)
		}
	}
	// A sandbox that hangs must not use up the time for which the others hold still.
	freezeCtx, cancel := context.WithTimeout(ctx, limit/2)
	defer cancel()
	err = eachAtOnce(targets, func(rec journal.Record) error {
		handler, err := m.handler(rec.Handler)
		if err != nil {
			return err
		}
		if err := handler.Freeze(freezeCtx, rec.Deferral.TargetPath, rec.Binding.Sandbox, limit); err != nil {
			return fmt.Errorf("freeze volume %s in sandbox %s: %w", rec.Deferral.VolumeID, rec.Binding.Sandbox.ID, err)
		}
		return nil
	})
	if err != nil {
		// Which of them are frozen is not certain; thawing one that is not does no harm.
		_ = m.thaw(ctx, targets)
		return nil, nil, err
	}
	for _, rec := range targets {
		frozen = append(frozen, rec.Deferral.VolumeID)
	}
	return frozen, notMounted, nil
}

// Thaw ends a freeze of volumes. It tries all of them; ErrFailedPrecondition if one had thawed by itself, or is in no
// sandbox any more, so that what was cut meanwhile is as after a power failure.
func (m *Manager) Thaw(ctx context.Context, driver string, volumeIDs []string) error {
	var targets []journal.Record
	var errs []error
	for _, id := range volumeIDs {
		if rec, ok := m.writer(driver, id); ok {
			targets = append(targets, rec)
		} else {
			errs = append(errs, fmt.Errorf("volume %s is in no sandbox any more: %w", id, errdefs.ErrFailedPrecondition))
		}
	}
	return errors.Join(append(errs, m.thaw(ctx, targets))...)
}

func (m *Manager) thaw(ctx context.Context, targets []journal.Record) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), thawTimeout)
	defer cancel()
	return eachAtOnce(targets, func(rec journal.Record) error {
		handler, err := m.handler(rec.Handler)
		if err != nil {
			return err
		}
		if err := handler.Thaw(ctx, rec.Deferral.TargetPath, rec.Binding.Sandbox); err != nil {
			return fmt.Errorf("thaw volume %s in sandbox %s: %w", rec.Deferral.VolumeID, rec.Binding.Sandbox.ID, err)
		}
		return nil
	})
}

// writer returns the record of the sandbox that has a volume mounted for writing.
func (m *Manager) writer(driver, volumeID string) (journal.Record, bool) {
	records := m.OfVolume(driver, volumeID)
	i := slices.IndexFunc(records, func(r journal.Record) bool {
		return r.Binding != nil && r.Binding.Mounted && !r.Deferral.ReadOnly
	})
	if i < 0 {
		return journal.Record{}, false
	}
	return records[i], true
}

// eachAtOnce runs fn for all records at the same time and joins their errors.
func eachAtOnce(records []journal.Record, fn func(journal.Record) error) error {
	errs := make([]error, len(records))
	var work sync.WaitGroup
	for i, rec := range records {
		work.Go(func() { errs[i] = fn(rec) })
	}
	work.Wait()
	return errors.Join(errs...)
}
