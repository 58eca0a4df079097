package crust

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/watch"
	"crust.dev/crust/protocol/rpc"
)

const (
	// reconcileInterval is how often records and world are held against each other when nothing has happened.
	reconcileInterval = time.Minute
	// retryInterval is how soon that is done again if something was left; it doubles each time.
	retryInterval = 500 * time.Millisecond
)

// reconcile holds records and world against each other: at once, when a driver's socket or a runtime's directory
// changes, and from time to time.
func (d *Daemon) reconcile(ctx context.Context, p *parts) error {
	wake := make(chan struct{}, 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return watch.Run(ctx, d.watched(), func(path string) {
			d.config.Log.DebugContext(ctx, "something has changed", rpc.LogPath, path)
			select {
			case wake <- struct{}{}:
			default:
			}
		})
	})
	group.Go(func() error {
		known := map[deferrals.Finding]bool{}
		wait := retryInterval
		for {
			findings := p.manager.Reconcile(ctx)
			known = d.report(ctx, p, findings, known)
			if wait *= 2; !somethingLeft(findings) && !p.manager.Unsettled() {
				wait = reconcileInterval
			}
			wait = min(wait, reconcileInterval)
			select {
			case <-ctx.Done():
				return nil
			case <-wake:
				wait = retryInterval
			case <-time.After(wait):
			}
		}
	})
	return group.Wait()
}

// somethingLeft says whether trying again may help.
func somethingLeft(findings []deferrals.Finding) bool {
	return slices.ContainsFunc(findings, func(f deferrals.Finding) bool { return f.Kind == deferrals.Left })
}

// watched are the paths at which a change is worth a look.
func (d *Daemon) watched() []string {
	var paths []string
	for _, s := range d.sockets.drivers {
		paths = append(paths, s.upstream)
	}
	for _, h := range d.config.Handlers {
		paths = append(paths, h.Roots()...)
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// report logs findings, those that stay only when they are new. It returns what is known now.
func (d *Daemon) report(ctx context.Context, p *parts, findings []deferrals.Finding, known map[deferrals.Finding]bool) map[deferrals.Finding]bool {
	now := map[deferrals.Finding]bool{}
	for _, f := range findings {
		now[f] = true
		level := slog.LevelInfo
		if f.Kind == deferrals.Left || f.Kind == deferrals.Strangers || f.Kind == deferrals.Breached {
			if known[f] {
				continue
			}
			level = slog.LevelWarn
		}
		p.metrics.Finding(string(f.Kind))
		d.config.Log.LogAttrs(ctx, level, "reconciled",
			slog.String("kind", string(f.Kind)), slog.String(rpc.LogPath, f.Path), slog.String(rpc.LogVolume, f.VolumeID), slog.String("finding", f.Text))
	}
	return now
}
