package keylock_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"crust.dev/crust/crust/internal/keylock"
)

func TestLock(t *testing.T) {
	t.Run("the same key waits and gives up with its context", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var s keylock.Set
			unlock, err := s.Lock(t.Context(), "a")
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := s.Lock(ctx, "b", "a"); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("second lock: %v, want the context's end", err)
			}
			// The one that gave up must not keep "b".
			unlockB, err := s.Lock(t.Context(), "b")
			if err != nil {
				t.Fatal(err)
			}
			unlockB()
			unlock()
			unlock, err = s.Lock(ctx2(t), "a", "a")
			if err != nil {
				t.Fatalf("after unlock: %v", err)
			}
			unlock()
		})
	})
	t.Run("crossing orders do not deadlock", func(t *testing.T) {
		var s keylock.Set
		done := make(chan error)
		for _, keys := range [][]string{{"a", "b"}, {"b", "a"}} {
			go func() {
				for range 1000 {
					unlock, err := s.Lock(t.Context(), keys...)
					if err != nil {
						done <- err
						return
					}
					unlock()
				}
				done <- nil
			}()
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
	})
}

func ctx2(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}
