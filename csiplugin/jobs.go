package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
)

// jobs are calls that are carried on when their caller no longer waits: cutting a snapshot of a badly fragmented volume
// takes minutes, which no CO waits for, and giving up half way would mean never to get there. The caller asks again, is told
// that the call is under way as long as it is (ErrAborted, by its locks), and then finds what it has made.
type jobs struct{ running sync.WaitGroup }

// run calls f in a job of its own and waits for its result while ctx lasts. After that it is ErrAborted, and f goes on.
func run[T any](ctx context.Context, j *jobs, f func(context.Context) (T, error)) (T, error) {
	type outcome struct {
		result T
		err    error
	}
	done := make(chan outcome, 1)
	j.running.Go(func() {
		result, err := f(context.WithoutCancel(ctx))
		done <- outcome{result, err}
	})
	select {
	case o := <-done:
		return o.result, o.err
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("it takes longer than the caller waits and goes on; ask again: %v: %w", context.Cause(ctx), errdefs.ErrAborted)
	}
}

// findOrMake returns what find finds of a name, or what create makes if that is ErrNotFound. One call at a time works on a
// name; it is carried on when its caller gives up.
func findOrMake[T, W any](ctx context.Context, s *store, lock string, want W, find, create func(context.Context, W) (T, error)) (T, error) {
	return run(ctx, s.jobs, func(ctx context.Context) (T, error) {
		release, err := s.locks.try(lock)
		if err != nil {
			var none T
			return none, err
		}
		defer release()
		found, err := find(ctx, want)
		if errors.Is(err, errdefs.ErrNotFound) {
			return create(ctx, want)
		}
		return found, err
	})
}

// wait waits until all jobs have ended, or ctx has.
func (j *jobs) wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		j.running.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("a snapshot or a clone is still being made and is given up: %w", ctx.Err())
	}
}
