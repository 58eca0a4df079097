// Package keylock has locks by name: what is done for one volume waits for what is done for the same volume and for
// nothing else.
package keylock

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// Set is a set of locks. The zero value is ready for use; it must not be copied.
type Set struct {
	mu    sync.Mutex
	locks map[string]*lock
}

type lock struct {
	held  chan struct{} // has one element while the lock is held
	users int           // holders and waiters
}

// Lock takes the locks of all keys, in an order that cannot deadlock, or none of them if ctx ends first; the error then
// wraps that of ctx. It returns the function that gives them back.
func (s *Set) Lock(ctx context.Context, keys ...string) (unlock func(), err error) {
	keys = slices.Clone(keys)
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for i, key := range keys {
		if err := s.lock(ctx, key); err != nil {
			s.unlock(keys[:i])
			return nil, fmt.Errorf("wait for another operation on %s: %w", key, err)
		}
	}
	return func() { s.unlock(keys) }, nil
}

func (s *Set) lock(ctx context.Context, key string) error {
	l := s.acquire(key)
	select {
	case l.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		s.release(key, l)
		return ctx.Err()
	}
}

func (s *Set) acquire(key string) *lock {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.locks == nil {
		s.locks = map[string]*lock{}
	}
	l := s.locks[key]
	if l == nil {
		l = &lock{held: make(chan struct{}, 1)}
		s.locks[key] = l
	}
	l.users++
	return l
}

func (s *Set) unlock(keys []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		l := s.locks[key]
		<-l.held
		s.release(key, l)
	}
}

func (s *Set) release(key string, l *lock) {
	l.users--
	if l.users == 0 {
		delete(s.locks, key)
	}
}
