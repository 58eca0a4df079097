package sandboxes

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
)

// TestReach: what is final for a sandbox that starts is said of its shim only, and not of a crustd that is about to end.
func TestReach(t *testing.T) {
	nobody := filepath.Join(t.TempDir(), "control.sock")
	if err := reach(t.Context(), nobody); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("nobody listens: %v", err)
	}
	ending, end := context.WithCancel(t.Context())
	end()
	if err := reach(ending, nobody); !errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("crustd ends: %v", err)
	}
}
