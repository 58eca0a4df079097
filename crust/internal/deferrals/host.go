package deferrals

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/runtimehandler"
)

// PublishOnHost notes that a volume is going to be mounted on the host, has publish do it, and keeps the note if it
// succeeded. ErrFailedPrecondition if a deferral has the volume, or the device that publish turns out to have mounted;
// then undo is called. What publish returns is returned as it is.
func (m *Manager) PublishOnHost(ctx context.Context, req Request, publish, undo func(context.Context) error) error {
	unlock, err := m.locks.Lock(ctx, req.TargetPath)
	if err != nil {
		return err
	}
	defer unlock()

	old, exists := m.journal.Get(req.TargetPath)
	if exists && !old.Host {
		return fmt.Errorf("volume %s is deferred to a sandbox at %s; unpublish it first: %w", old.Deferral.VolumeID, req.TargetPath, errdefs.ErrAlreadyExists)
	}
	rec := journal.Record{
		State:    journal.Publishing,
		Host:     true,
		Created:  time.Now().UTC(),
		Deferral: runtimehandler.Deferral{Driver: req.Driver, VolumeID: req.VolumeID, TargetPath: req.TargetPath, ReadOnly: req.ReadOnly},
	}
	if err := m.journal.Put(notDeferred(rec.Deferral), rec); err != nil {
		return err
	}
	crashpoint.At(ctx, "publish on host: noted")
	if err := publish(ctx); err != nil {
		// The driver may have mounted it all the same; the note goes only if there is nothing.
		return errors.Join(err, m.dropStale(rec))
	}
	crashpoint.At(ctx, "publish on host: published")
	if err := m.notOfDeferral(rec.Deferral); err != nil {
		undoCtx, cancel := undoContext(ctx)
		defer cancel()
		if undoErr := undo(undoCtx); undoErr != nil {
			return fmt.Errorf("%v; undoing it failed as well: %v: %w", err, undoErr, errdefs.ErrUnavailable)
		}
		return errors.Join(err, m.journal.Delete(req.TargetPath))
	}
	rec.State = journal.Published
	if err := m.journal.Put(nil, rec); err != nil {
		return err
	}
	crashpoint.At(ctx, "publish on host: committed")
	return nil
}

// UnpublishOnHost has unpublish undo a host mount and forgets it. It does so for target paths that nobody has noted, too.
func (m *Manager) UnpublishOnHost(ctx context.Context, targetPath string, unpublish func(context.Context) error) error {
	unlock, err := m.locks.Lock(ctx, targetPath)
	if err != nil {
		return err
	}
	defer unlock()
	if err := unpublish(ctx); err != nil {
		return err
	}
	crashpoint.At(ctx, "unpublish on host: unpublished")
	if err := m.journal.Delete(targetPath); err != nil {
		return err
	}
	crashpoint.At(ctx, "unpublish on host: forgotten")
	return nil
}

// notDeferred returns the guard for a host mount: whether two host mounts of one volume go together is the driver's
// business.
func notDeferred(d runtimehandler.Deferral) func(journal.Record) error {
	return func(existing journal.Record) error {
		other := existing.Deferral
		if existing.Host || other.Driver != d.Driver || other.VolumeID != d.VolumeID || d.ReadOnly && other.ReadOnly {
			return nil
		}
		return fmt.Errorf("volume %s is deferred to a sandbox at %s, and its filesystem can have one user only: delete the pod that uses it there first: %w",
			d.VolumeID, other.TargetPath, errdefs.ErrFailedPrecondition)
	}
}

// notOfDeferral looks at what a driver has put at a target path: it may be the device of a deferral under another name.
func (m *Manager) notOfDeferral(d runtimehandler.Deferral) error {
	for _, rec := range m.List() {
		if d.ReadOnly && rec.Deferral.ReadOnly {
			continue
		}
		same, err := publishedFrom(d.TargetPath, rec.Deferral.Device)
		if err != nil {
			return err
		}
		if same {
			return fmt.Errorf("volume %s is on device %s, which is deferred to a sandbox as volume %s at %s: one device can have one user only: %w",
				d.VolumeID, rec.Deferral.Device, rec.Deferral.VolumeID, rec.Deferral.TargetPath, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// dropStale forgets a host mount that is not there.
func (m *Manager) dropStale(rec journal.Record) error {
	if onHost(rec.Deferral.TargetPath) {
		return nil
	}
	return m.journal.Delete(rec.Deferral.TargetPath)
}

// onHost says whether anything is mounted at a target path. When in doubt there is.
func onHost(target string) bool {
	mounted, err := mountinfo.Mounted(target)
	return mounted || err != nil && !errors.Is(err, os.ErrNotExist)
}
