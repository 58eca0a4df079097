package csiplugin

import (
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
)

// locks are locks by key that are tried and never waited for: CSI lets a plugin reject a second call for a volume with
// ABORTED, and the CO comes again (CSI, Concurrency).
type locks struct {
	mu   sync.Mutex
	held map[string]bool
}

func newLocks() *locks { return &locks{held: map[string]bool{}} }

// try takes the lock of a key, or is ErrAborted. The caller calls release once.
func (l *locks) try(key string) (release func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[key] {
		return nil, fmt.Errorf("another call for %s is under way; try again when it has ended: %w", key, errdefs.ErrAborted)
	}
	l.held[key] = true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.held, key)
	}, nil
}
