package deferrals

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/runtimehandler"
)

// How long the inside of a sandbox may take. A hung guest costs its own volume this much and nobody else anything.
const (
	statsTimeout  = 15 * time.Second
	expandTimeout = 90 * time.Second
)

// ErrNotMounted is what Stats returns while there is nothing to measure. It wraps ErrUnavailable.
var ErrNotMounted = fmt.Errorf("no sandbox has mounted it yet: %w", errdefs.ErrUnavailable)

// ErrBreached is what Stats returns if the sandbox runs without the volume. It wraps ErrFailedPrecondition.
var ErrBreached = fmt.Errorf("the deferral is breached: %w", errdefs.ErrFailedPrecondition)

// Stats measures a volume inside its sandbox. ErrNotFound for a target path that is not a deferral's; ErrUnavailable
// while no sandbox has mounted it, or if the sandbox does not answer in time.
func (m *Manager) Stats(ctx context.Context, targetPath string) (runtimehandler.Stats, error) {
	rec, ok := m.journal.Get(targetPath)
	if !ok || rec.Host {
		return runtimehandler.Stats{}, fmt.Errorf("no deferral is published at %s: %w", targetPath, errdefs.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	if watched(rec) {
		if err := m.discoverOne(ctx, targetPath); err != nil {
			return runtimehandler.Stats{}, err
		}
		rec, _ = m.journal.Get(targetPath)
	}
	if rec.Binding != nil && rec.Binding.Breach != "" {
		return runtimehandler.Stats{}, fmt.Errorf("%s: %w", breached(rec), ErrBreached)
	}
	if rec.Binding == nil || !rec.Binding.Mounted {
		return runtimehandler.Stats{}, fmt.Errorf("volume %s: %w", rec.Deferral.VolumeID, ErrNotMounted)
	}
	handler, err := m.handler(rec.Handler)
	if err != nil {
		return runtimehandler.Stats{}, err
	}
	stats, err := handler.Stats(ctx, targetPath, rec.Binding.Sandbox)
	if err != nil {
		return runtimehandler.Stats{}, fmt.Errorf("stats of volume %s from sandbox %s: %w", rec.Deferral.VolumeID, rec.Binding.Sandbox.ID, err)
	}
	return stats, nil
}

// Expand grows a volume: first its device, by grow, which returns the device's size in bytes; then what the sandbox sees
// and the filesystem inside. Without a sandbox the latter is left to the next mount, which grows a filesystem to its device,
// or to the handler before that. It returns the device's size. After any failure it can be repeated, and what was begun is finished by
// Reconcile if nobody does. ErrNotFound for a target path that is not a deferral's.
func (m *Manager) Expand(ctx context.Context, targetPath string, grow func(ctx context.Context) (int64, error)) (int64, error) {
	unlock, err := m.locks.Lock(ctx, targetPath)
	if err != nil {
		return 0, err
	}
	defer unlock()

	rec, ok := m.journal.Get(targetPath)
	if !ok || rec.Host {
		return 0, fmt.Errorf("no deferral is published at %s: %w", targetPath, errdefs.ErrNotFound)
	}
	if rec.State != journal.Published {
		return 0, fmt.Errorf("volume %s is %s at %s, not published: %w", rec.Deferral.VolumeID, rec.State, targetPath, errdefs.ErrAborted)
	}
	if rec, err = m.discover(ctx, rec); err != nil {
		return 0, err
	}
	size, err := grow(ctx)
	if err != nil {
		return 0, err
	}
	crashpoint.At(ctx, "expand: device grown")
	if rec.Binding == nil && size <= rec.Deferral.SizeBytes {
		return size, nil
	}
	rec.Deferral.SizeBytes = max(size, rec.Deferral.SizeBytes)
	if rec.Binding != nil {
		rec.Expanding = rec.Deferral.SizeBytes
	} else if err := m.restage(ctx, rec); err != nil {
		return 0, err
	}
	if err := m.journal.Put(nil, rec); err != nil {
		return 0, err
	}
	crashpoint.At(ctx, "expand: intended")
	if rec.Binding == nil {
		return size, nil
	}
	return m.expandInside(ctx, rec)
}

// restage hands a deferral over again whose device has grown: what a runtime does not do when it mounts, its handler does
// before.
func (m *Manager) restage(ctx context.Context, rec journal.Record) error {
	handler, err := m.handler(rec.Handler)
	if err != nil {
		return err
	}
	d := rec.Deferral
	d.Blankness = blankness(rec)
	if err := handler.Stage(ctx, d); err != nil {
		return fmt.Errorf("handler %s: stage %s: %w", rec.Handler, d.TargetPath, err)
	}
	crashpoint.At(ctx, "expand: staged again")
	return nil
}

// ExpandToDevice is Expand for a device that its owner has grown already. ErrOutOfRange if its size is not within
// required and limit, in bytes, of which 0 is no bound.
func (m *Manager) ExpandToDevice(ctx context.Context, targetPath string, required, limit int64) (int64, error) {
	return m.Expand(ctx, targetPath, func(context.Context) (int64, error) {
		rec, _ := m.journal.Get(targetPath)
		size, err := DeviceSize(rec.Deferral.Device)
		if err != nil {
			return 0, err
		}
		if size < required || limit != 0 && size > limit {
			return 0, fmt.Errorf("device %s has %d bytes, want %d to %d; grow the device first: %w", rec.Deferral.Device, size, required, limit, errdefs.ErrOutOfRange)
		}
		return size, nil
	})
}

// expandInside finishes an expansion in the sandbox.
func (m *Manager) expandInside(ctx context.Context, rec journal.Record) (int64, error) {
	sandbox := rec.Binding.Sandbox
	if !rec.Binding.Mounted {
		return 0, fmt.Errorf("volume %s is being mounted in sandbox %s; expand it again when that is done: %w", rec.Deferral.VolumeID, sandbox.ID, errdefs.ErrUnavailable)
	}
	handler, err := m.handler(rec.Handler)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, expandTimeout)
	defer cancel()
	size, err := handler.Expand(ctx, rec.Deferral.TargetPath, sandbox, rec.Expanding)
	if err != nil && !handler.Capabilities().OnlineExpand && (errdefs.IsFailedPrecondition(err) || errdefs.IsNotImplemented(err)) {
		// It is finished when the volume is published next; until then asking again would not help.
		rec.Expanding = 0
		err = errors.Join(err, m.journal.Put(nil, rec))
	}
	if err != nil {
		return 0, fmt.Errorf("expand volume %s in sandbox %s: %w", rec.Deferral.VolumeID, sandbox.ID, err)
	}
	crashpoint.At(ctx, "expand: grown inside")
	rec.Expanding = 0
	if err := m.journal.Put(nil, rec); err != nil {
		return 0, err
	}
	crashpoint.At(ctx, "expand: committed")
	return size, nil
}
