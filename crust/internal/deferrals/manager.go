package deferrals

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/keylock"
	"crust.dev/crust/runtimehandler"
)

// undoTimeout bounds the clean-up after a failed operation, which no longer listens to its caller.
const undoTimeout = 30 * time.Second

// Storage is the side of one volume that keeps its data: for CSI the SP, called by the facade that knows how.
type Storage interface {
	// Publish makes the device usable on this node and says what has to be mounted. It is idempotent.
	Publish(ctx context.Context) (runtimehandler.Deferral, error)
	// Unpublish takes it back. neverMounted says that no sandbox has mounted it since it was published. It is
	// idempotent; a volume that the storage does not know is no error.
	Unpublish(ctx context.Context, neverMounted bool) error
}

// Config is what a Manager works with.
type Config struct {
	Journal  *journal.Journal
	Handlers []runtimehandler.Handler
	// DeviceRoots are the directories from which devices may come; none: all.
	DeviceRoots []string
	// Published, if not nil, is told of every volume that was newly published.
	Published func()
	// Notify, if not nil, is told of what the owner of a pod should know of its volume. It must not block.
	Notify func(Notice)
	// StorageOf returns the storage of a volume that was published before. It is asked when nobody who knows calls, and
	// may fail with ErrUnavailable.
	StorageOf func(ctx context.Context, d runtimehandler.Deferral) (Storage, error)
}

// Notice is something that the owner of a pod should know of its volume.
type Notice struct {
	Pod     journal.Pod
	Warning bool
	Reason  string // in CamelCase, for machines
	Message string // for people
}

// Manager takes deferrals through their life. Its methods may be called from several goroutines; what concerns one
// target path happens one after the other.
type Manager struct {
	journal     *journal.Journal
	handlers    map[string]runtimehandler.Handler
	deviceRoots []string
	published   func()
	notify      func(Notice)
	storageOf   func(ctx context.Context, d runtimehandler.Deferral) (Storage, error)
	locks       keylock.Set
}

// New returns a manager over an open journal.
func New(c Config) (*Manager, error) {
	if c.Journal == nil || len(c.Handlers) == 0 || c.StorageOf == nil {
		return nil, fmt.Errorf("deferrals: a journal, a handler and storage are needed: %w", errdefs.ErrInvalidArgument)
	}
	m := &Manager{journal: c.Journal, deviceRoots: c.DeviceRoots, storageOf: c.StorageOf, published: c.Published, notify: c.Notify, handlers: map[string]runtimehandler.Handler{}}
	if m.published == nil {
		m.published = func() {}
	}
	if m.notify == nil {
		m.notify = func(Notice) {}
	}
	for _, h := range c.Handlers {
		if m.handlers[h.Name()] != nil {
			return nil, fmt.Errorf("deferrals: two handlers are called %s: %w", h.Name(), errdefs.ErrInvalidArgument)
		}
		m.handlers[h.Name()] = h
	}
	return m, nil
}

// Has says whether a target path is that of a deferral.
func (m *Manager) Has(targetPath string) bool {
	rec, ok := m.journal.Get(targetPath)
	return ok && !rec.Host
}

// List returns the records of all deferrals, sorted by target path.
func (m *Manager) List() []journal.Record { return m.journal.List(isDeferral) }

func isDeferral(r journal.Record) bool { return !r.Host }

// OfVolume returns the deferrals of one volume.
func (m *Manager) OfVolume(driver, volumeID string) []journal.Record {
	return m.journal.List(func(r journal.Record) bool {
		return !r.Host && r.Deferral.Driver == driver && r.Deferral.VolumeID == volumeID
	})
}

// handler returns the handler of a name. ErrFailedPrecondition if it is not configured.
func (m *Manager) handler(name string) (runtimehandler.Handler, error) {
	if h := m.handlers[name]; h != nil {
		return h, nil
	}
	return nil, fmt.Errorf("runtime handler %q is not configured (there is %s): %w",
		name, strings.Join(slices.Sorted(maps.Keys(m.handlers)), ", "), errdefs.ErrFailedPrecondition)
}

// undoContext returns the context for a clean-up: it goes on when the caller has given up.
func undoContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
}
