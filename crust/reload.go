package crust

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"crust.dev/crust/crust/internal/policy"
	"crust.dev/crust/crust/internal/watch"
	"crust.dev/crust/protocol/rpc"
)

// File is a configuration file. The daemon reads it again when it changes, and once a minute. What cannot be read, or is
// invalid, changes nothing: the daemon goes on with what it has, and says so in its log, a metric and its status.
type File struct {
	// Path is absolute.
	Path string
	// Read reads and checks all of it.
	Read func() (Update, error)
}

// Update is what a configuration file says now.
type Update struct {
	Settings
	// Restart are the keys that differ from what the daemon was started with and that only a restart can change.
	Restart []string
}

// Settings are what can change while the daemon runs. DefaultPolicy and RuntimeClasses are those of Config; they hold for
// volumes that are published from then on.
type Settings struct {
	DefaultPolicy  string
	RuntimeClasses map[string]string
	LogLevel       slog.Level
}

// follower keeps the daemon to its configuration file.
type follower struct {
	daemon *Daemon
	parts  *parts

	mu      sync.Mutex
	problem error // why the daemon does not work with what the file says; nil if it does
}

// run follows the file until ctx ends.
func (f *follower) run(ctx context.Context) error {
	wake := make(chan struct{}, 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		// The directory is watched, not the file: a ConfigMap's file is a link that never changes itself.
		err := watch.Run(ctx, []string{filepath.Dir(f.daemon.config.File.Path)}, func(string) {
			select {
			case wake <- struct{}{}:
			default:
			}
		})
		if err != nil {
			f.daemon.config.Log.WarnContext(ctx, "changes of the configuration file are only noticed once a minute", rpc.LogError, err)
		}
		return nil
	})
	group.Go(func() error {
		for {
			f.read(ctx)
			select {
			case <-ctx.Done():
				return nil
			case <-wake:
			case <-time.After(reconcileInterval):
			}
		}
	})
	return group.Wait()
}

// read reads the file and does what it says.
func (f *follower) read(ctx context.Context) {
	config := f.daemon.config
	update, err := config.File.Read()
	if err == nil {
		err = f.apply(ctx, update.Settings)
	}
	if len(update.Restart) > 0 {
		err = errors.Join(err, fmt.Errorf("%s: changed since crustd was started; restart it for that to take effect", strings.Join(update.Restart, ", ")))
	}
	f.mu.Lock()
	before := f.problem
	f.problem = err
	f.mu.Unlock()
	f.parts.metrics.Configuration(err == nil)
	switch {
	case err == nil && before != nil:
		config.Log.InfoContext(ctx, "the configuration file is in force again", rpc.LogPath, config.File.Path)
	case err != nil && (before == nil || before.Error() != err.Error()):
		config.Log.WarnContext(ctx, "the configuration file is not in force, or not all of it", rpc.LogPath, config.File.Path, rpc.LogError, err)
	}
}

// apply puts settings into force, all or none.
func (f *follower) apply(ctx context.Context, s Settings) error {
	config := f.daemon.config
	if err := config.checkClasses(s.RuntimeClasses); err != nil {
		return err
	}
	before := f.parts.policy.Rules()
	if err := f.parts.policy.Set(policy.Rules{Default: s.DefaultPolicy, RuntimeClasses: s.RuntimeClasses}); err != nil {
		return err
	}
	var changed []string
	if now := f.parts.policy.Rules(); now.Default != before.Default || !maps.Equal(now.RuntimeClasses, before.RuntimeClasses) {
		changed = append(changed, fmt.Sprintf("default policy %s, RuntimeClass handlers %v", now.Default, now.RuntimeClasses))
	}
	if config.LogLevel != nil && config.LogLevel.Level() != s.LogLevel {
		config.LogLevel.Set(s.LogLevel)
		changed = append(changed, "log level "+s.LogLevel.String())
	}
	if len(changed) > 0 {
		config.Log.InfoContext(ctx, "the configuration has changed", rpc.LogPath, config.File.Path, "now", strings.Join(changed, "; "))
	}
	return nil
}

// check is nil if the daemon works with what the file says.
func (f *follower) check(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problem
}
