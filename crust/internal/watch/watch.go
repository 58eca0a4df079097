// Package watch tells when something changes at paths that may not exist yet, may go, and may come back: sockets of
// drivers, directories of runtimes, the kubelet's registration directory.
package watch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a path must have been quiet before its change is told: files are made in several steps.
const settle = 100 * time.Millisecond

// Run calls changed with one of paths whenever something was made, removed, renamed or written at it or directly in it,
// until ctx ends. Calls come one after the other. The paths are absolute. Whatever happened before Run was called, or
// between two calls of changed, is for the caller to look at.
func Run(ctx context.Context, paths []string, changed func(path string)) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	defer w.Close()
	if err := follow(w, paths); err != nil {
		return err
	}
	pending := map[string]bool{}
	timer := time.NewTimer(settle)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-w.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("watch: %w", err)
			}
			for _, p := range paths { // events were lost: everything may have changed
				pending[p] = true
			}
			timer.Reset(settle)
		case event := <-w.Events:
			for _, p := range paths {
				if concerns(event.Name, p) {
					pending[p] = true
				}
			}
			timer.Reset(settle)
		case <-timer.C:
			if err := follow(w, paths); err != nil {
				return err
			}
			for p := range pending {
				changed(p)
			}
			clear(pending)
		}
	}
}

// concerns says whether something at name is about a path: it is the path, an ancestor of it, or directly in it.
func concerns(name, path string) bool {
	return name == path || filepath.Dir(name) == path || strings.HasPrefix(path, strings.TrimSuffix(name, "/")+"/")
}

// follow watches each path that is a directory, and the nearest directory above each path.
func follow(w *fsnotify.Watcher, paths []string) error {
	for _, p := range paths {
		for _, dir := range []string{p, nearest(filepath.Dir(p))} {
			info, err := os.Stat(dir)
			if err != nil || !info.IsDir() {
				continue
			}
			// Adding again is cheap, and follows a directory that was replaced by another of the same name.
			if err := w.Add(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("watch %s: %w", dir, err)
			}
		}
	}
	return nil
}

// nearest returns the directory itself, or the nearest one above it that exists.
func nearest(dir string) string {
	for dir != "/" {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	return dir
}
