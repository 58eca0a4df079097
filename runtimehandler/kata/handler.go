package kata

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/cri"
)

// Handler is a runtimehandler.Handler.
type Handler struct {
	config  Config
	paths   paths
	bundles *bundles
	cri     *cri.Client // nil without an endpoint

	// mu is held while records are put out or withdrawn, which takes no longer than a few renames.
	mu sync.Mutex
	// own has the records that this process has put out (true) or withdrawn (false). The list of deferrals that Sweep is
	// given may be older than either, and must not overrule it.
	own map[string]bool
}

var _ runtimehandler.Handler = (*Handler)(nil)

// Name is that of the configuration.
func (h *Handler) Name() string { return h.config.Name }

// Roots are the directories of sandboxes, and that of records. Kata makes and removes them as it likes.
func (h *Handler) Roots() []string {
	return []string{h.paths.goSandboxes, h.paths.rustSandboxes, h.paths.records}
}

// Freeze is something that Kata's agent cannot do.
func (h *Handler) Freeze(context.Context, string, runtimehandler.Sandbox, time.Duration) error {
	return h.never("freeze")
}

// Thaw is something that Kata's agent cannot do.
func (h *Handler) Thaw(context.Context, string, runtimehandler.Sandbox) error { return h.never("thaw") }

func (h *Handler) never(what string) error {
	return fmt.Errorf("handler %s: Kata's agent cannot %s a filesystem: %w", h.config.Name, what, errdefs.ErrNotImplemented)
}
