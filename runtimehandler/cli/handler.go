package cli

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
)

// Name is the name of the handler unless the configuration gives it another one.
const Name = "cli"

// DefaultRoot is KEP-2857's directory for records.
const DefaultRoot = "/run/crust"

// defaultTimeout bounds a command of the runtime's.
const defaultTimeout = 10 * time.Second

// Config is how a handler works.
type Config struct {
	// Name is what the handler is called; Name if empty.
	Name string
	// Root is the directory of records, absolute; DefaultRoot if empty.
	Root string
	// Timeout bounds each command; 10 s if zero.
	Timeout time.Duration
	// Capabilities are those of the runtime. A runtime that formats must do so only on a device whose record says that
	// it was never written and on which it finds nothing itself.
	Capabilities runtimehandler.Capabilities
	// Ignore are names in Root that belong to the daemon, and are not reported.
	Ignore []string
}

// Handler is a runtimehandler.Handler.
type Handler struct {
	config Config

	mu sync.Mutex // held while records are changed
	// own has the records that this process has put out (true) or removed (false). The list of deferrals that Sweep is
	// given may be older than either, and must not overrule it.
	own map[string]bool
}

var _ runtimehandler.Handler = (*Handler)(nil)

// New checks a configuration. It does no I/O.
func New(c Config) (*Handler, error) {
	c.Name = cmp.Or(c.Name, Name)
	c.Root = cmp.Or(c.Root, DefaultRoot)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	if !filepath.IsAbs(c.Root) || c.Timeout < 0 {
		return nil, fmt.Errorf("handler %s: root %q must be absolute and timeout %v positive: %w", c.Name, c.Root, c.Timeout, errdefs.ErrInvalidArgument)
	}
	c.Capabilities.Freeze = false // the command has no such verb
	return &Handler{config: c, own: map[string]bool{}}, nil
}

// Name is constant.
func (h *Handler) Name() string { return h.config.Name }

// Capabilities are those of the configuration.
func (h *Handler) Capabilities() runtimehandler.Capabilities { return h.config.Capabilities }

// Roots is the directory of records: runtime-cli appears and disappears beneath it.
func (h *Handler) Roots() []string { return []string{h.config.Root} }

// Freeze is not part of KEP-2857.
func (h *Handler) Freeze(context.Context, string, runtimehandler.Sandbox, time.Duration) error {
	return fmt.Errorf("handler %s: the runtime's command cannot freeze: %w", h.config.Name, errdefs.ErrNotImplemented)
}

// Thaw is not part of KEP-2857.
func (h *Handler) Thaw(context.Context, string, runtimehandler.Sandbox) error {
	return fmt.Errorf("handler %s: the runtime's command cannot thaw: %w", h.config.Name, errdefs.ErrNotImplemented)
}
