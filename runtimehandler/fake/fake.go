// Package fake is a runtime in memory: a runtimehandler.Handler with the behaviour that the contract asks for, for tests
// of what calls handlers.
package fake

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
)

// Runtime is the fake. Its handlers share its state.
type Runtime struct {
	name         string
	capabilities runtimehandler.Capabilities

	mu        sync.Mutex
	staged    map[string]runtimehandler.Deferral
	sandboxes map[string]*sandbox // by target path
	failing   error
}

type sandbox struct {
	runtimehandler.Sandbox
	deferral runtimehandler.Deferral
	size     int64 // of the device, as the guest sees it
	hung     bool
	frozen   time.Time // when the freeze ends; zero: not frozen
}

// New returns a runtime whose sandboxes have these abilities.
func New(name string, capabilities runtimehandler.Capabilities) *Runtime {
	return &Runtime{name: name, capabilities: capabilities, staged: map[string]runtimehandler.Deferral{}, sandboxes: map[string]*sandbox{}}
}

// Handler returns a handler for the runtime.
func (r *Runtime) Handler() runtimehandler.Handler { return handler{r} }

// Mount starts a sandbox that mounts what is staged at a target path. ErrNotFound if nothing is.
func (r *Runtime) Mount(targetPath string) (runtimehandler.Sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d, ok := r.staged[targetPath]
	if !ok {
		return runtimehandler.Sandbox{}, fmt.Errorf("nothing is staged at %s: %w", targetPath, errdefs.ErrNotFound)
	}
	s := &sandbox{Sandbox: runtimehandler.Sandbox{ID: "sandbox-of-" + d.VolumeID, Runtime: r.name, Address: targetPath}, deferral: d, size: d.SizeBytes}
	r.sandboxes[targetPath] = s
	return s.Sandbox, nil
}

// Unmount ends the sandbox that has the volume at a target path.
func (r *Runtime) Unmount(targetPath string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sandboxes, targetPath)
}

// Hang has the sandbox at a target path not answer any more.
func (r *Runtime) Hang(targetPath string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[targetPath]; s != nil {
		s.hung = true
	}
}

// Lose forgets what is staged.
func (r *Runtime) Lose() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.staged)
}

// Fail has Stage and Unstage fail with an error; nil: no longer.
func (r *Runtime) Fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failing = err
}

// Staged returns what is staged at a target path.
func (r *Runtime) Staged(targetPath string) (runtimehandler.Deferral, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d, ok := r.staged[targetPath]
	return d, ok
}

type handler struct{ *Runtime }

func (h handler) Name() string                              { return h.name }
func (h handler) Capabilities() runtimehandler.Capabilities { return h.capabilities }
func (h handler) Roots() []string                           { return nil }

func (h handler) Stage(_ context.Context, d runtimehandler.Deferral) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failing == nil {
		h.staged[d.TargetPath] = d
	}
	return h.failing
}

func (h handler) Unstage(_ context.Context, targetPath string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failing == nil {
		delete(h.staged, targetPath)
	}
	return h.failing
}

func (h handler) Sweep(_ context.Context, staged []runtimehandler.Deferral) ([]runtimehandler.Leftover, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.staged)
	for _, d := range staged {
		h.staged[d.TargetPath] = d
	}
	return nil, nil
}

func (h handler) Status(_ context.Context, targetPath string, _ *runtimehandler.Sandbox) (runtimehandler.Status, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.sandboxes[targetPath]
	if s == nil {
		return runtimehandler.Status{}, nil
	}
	return runtimehandler.Status{Sandbox: &s.Sandbox, Mounted: true}, nil
}

// in runs fn on the sandbox that has a volume, if it answers.
func (h handler) in(ctx context.Context, targetPath string, fn func(*sandbox) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	h.mu.Lock()
	s := h.sandboxes[targetPath]
	if s != nil && s.hung {
		h.mu.Unlock()
		<-ctx.Done()
		return fmt.Errorf("no answer in time: %w", errdefs.ErrUnavailable)
	}
	defer h.mu.Unlock()
	if s == nil {
		return fmt.Errorf("no sandbox has %s: %w", targetPath, errdefs.ErrNotFound)
	}
	return fn(s)
}

func (h handler) Stats(ctx context.Context, targetPath string, _ runtimehandler.Sandbox) (runtimehandler.Stats, error) {
	var stats runtimehandler.Stats
	err := h.in(ctx, targetPath, func(s *sandbox) error {
		stats = runtimehandler.Stats{
			Bytes:  runtimehandler.Usage{Total: s.size, Used: s.size / 4, Available: s.size / 2},
			Inodes: runtimehandler.Usage{Total: 1000, Used: 11, Available: 989},
		}
		return nil
	})
	return stats, err
}

func (h handler) Expand(ctx context.Context, targetPath string, _ runtimehandler.Sandbox, requiredBytes int64) (int64, error) {
	if !h.capabilities.OnlineExpand {
		return 0, fmt.Errorf("runtime %s cannot expand a mounted volume; it grows at the next start: %w", h.name, errdefs.ErrFailedPrecondition)
	}
	var size int64
	err := h.in(ctx, targetPath, func(s *sandbox) error {
		info, err := os.Stat(s.deferral.Device)
		if err != nil {
			return err
		}
		if info.Size() < requiredBytes {
			return fmt.Errorf("device has %d bytes, %d are required: %w", info.Size(), requiredBytes, errdefs.ErrFailedPrecondition)
		}
		s.size = max(s.size, info.Size())
		size = s.size
		return nil
	})
	return size, err
}

func (h handler) Freeze(ctx context.Context, targetPath string, _ runtimehandler.Sandbox, limit time.Duration) error {
	if !h.capabilities.Freeze {
		return fmt.Errorf("runtime %s cannot freeze: %w", h.name, errdefs.ErrNotImplemented)
	}
	return h.in(ctx, targetPath, func(s *sandbox) error {
		if time.Now().Before(s.frozen) {
			return fmt.Errorf("%s is frozen already: %w", targetPath, errdefs.ErrFailedPrecondition)
		}
		s.frozen = time.Now().Add(limit)
		return nil
	})
}

func (h handler) Thaw(ctx context.Context, targetPath string, _ runtimehandler.Sandbox) error {
	if !h.capabilities.Freeze {
		return fmt.Errorf("runtime %s cannot thaw: %w", h.name, errdefs.ErrNotImplemented)
	}
	return h.in(ctx, targetPath, func(s *sandbox) error {
		if !time.Now().Before(s.frozen) {
			return fmt.Errorf("%s is not frozen: %w", targetPath, errdefs.ErrFailedPrecondition)
		}
		s.frozen = time.Time{}
		return nil
	})
}
