package csiplugin

import (
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
)

// locks are locks by key that are tried and never waited for: CSI lets a plugin reject a second call for a volume with
// ABORTED, and the CO comes again (CSI, Concurrency).
type locks struct {
	mu sync.Mutex
	// held is how many share a lock, or exclusive.
	held map[string]int
}

const exclusive = -1

func newLocks() *locks { return &locks{held: map[string]int{}} }

// try takes the lock of a key for the caller alone, or is ErrAborted. The caller calls release once.
func (l *locks) try(key string) (release func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[key] != 0 {
		return nil, busy(key)
	}
	l.held[key] = exclusive
	return func() { l.give(key) }, nil
}

// share takes the lock of a key together with others who share it, or is ErrAborted. The caller calls release once.
func (l *locks) share(key string) (release func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[key] == exclusive {
		return nil, busy(key)
	}
	l.held[key]++
	return func() { l.give(key) }, nil
}

func (l *locks) give(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[key]--; l.held[key] <= 0 {
		delete(l.held, key)
	}
}

func busy(key string) error {
	return fmt.Errorf("another call for %s is under way; try again when it has ended: %w", key, errdefs.ErrAborted)
}
