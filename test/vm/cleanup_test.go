package vm_test

import (
	"context"
	"testing"
	"time"

	"crust.dev/crust/test/vm"
)

// cleanupContext is for what is done when the test's own context has ended.
func cleanupContext(t testing.TB) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(t.Context()), vm.Timeout)
}

// timeout is for a step that is to fail when its time is up.
func timeout(t testing.TB, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), d)
}
