package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	"github.com/containerd/errdefs"
)

// MaxOpen is how many commands may be open, which includes those that have ended and were not closed.
const MaxOpen = 64

// Table has the open commands.
type Table struct {
	// Cgroups is where control groups of version 2 are mounted; empty is DefaultCgroups. Only containers need them.
	Cgroups string

	mu       sync.Mutex
	open     map[string]*Process
	starting int // being started, which may take as long as a filesystem takes to answer
	last     int
	closed   bool
}

// Start starts a command, which outlives ctx. ErrNotFound if there is no such program or working directory,
// ErrResourceExhausted if too many commands are open, ErrUnavailable after Close.
func (t *Table) Start(ctx context.Context, s Spec) (*Process, error) {
	if err := t.reserve(); err != nil {
		return nil, err
	}
	id := t.nextID()
	p, err := t.startIn(ctx, s, id)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.starting--
	if err != nil {
		return nil, err
	}
	p.ID = id
	if t.open == nil {
		t.open = map[string]*Process{}
	}
	t.open[p.ID] = p
	return p, nil
}

func (t *Table) nextID() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	return strconv.Itoa(t.last)
}

// startIn starts a command, in the container that it belongs to.
func (t *Table) startIn(ctx context.Context, s Spec, id string) (*Process, error) {
	switch {
	case s.Container == nil:
		return start(ctx, s, nil)
	case s.Container.Join == "":
		g, err := newGroup(cmp.Or(t.Cgroups, DefaultCgroups), "crust-"+id)
		if err != nil {
			return nil, err
		}
		p, err := start(ctx, s, g)
		if err != nil {
			g.remove()
		}
		return p, err
	}
	first, err := t.Get(s.Container.Join)
	if err != nil {
		return nil, err
	}
	if !first.first() || first.spec.Container.Root != s.Container.Root {
		return nil, fmt.Errorf("command %s is not the first of a container with root %s: %w", first.ID, s.Container.Root, errdefs.ErrFailedPrecondition)
	}
	if closedNow(first.exited) {
		return nil, fmt.Errorf("the container has ended: %w", errdefs.ErrFailedPrecondition)
	}
	p, err := start(ctx, s, first.group)
	if err == nil && closedNow(first.exited) {
		_ = first.group.kill() // it may have come after the killing of all others
	}
	return p, err
}

func (t *Table) reserve() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return fmt.Errorf("the guest is shutting down: %w", errdefs.ErrUnavailable)
	}
	if n := len(t.open) + t.starting; n >= MaxOpen {
		return fmt.Errorf("%d commands are open; close some: %w", n, errdefs.ErrResourceExhausted)
	}
	t.starting++
	return nil
}

// Get returns an open command. ErrNotFound if there is none of that name.
func (t *Table) Get(id string) (*Process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.open[id]
	if p == nil {
		return nil, fmt.Errorf("no command %q is open: %w", id, errdefs.ErrNotFound)
	}
	return p, nil
}

// Remove kills what is left of a command and forgets it. One that is not open is success. ErrUnavailable if it does not
// die before ctx ends; it is then still open.
func (t *Table) Remove(ctx context.Context, id string) error {
	t.mu.Lock()
	p := t.open[id]
	t.mu.Unlock()
	if p == nil {
		return nil
	}
	if err := p.end(ctx); err != nil {
		return err
	}
	t.mu.Lock()
	delete(t.open, id)
	t.mu.Unlock()
	return nil
}

// Close kills all commands, and no more are started until Reopen. Its error names those that did not die before ctx ended.
func (t *Table) Close(ctx context.Context) error {
	t.mu.Lock()
	t.closed = true
	ids := slices.Collect(maps.Keys(t.open))
	t.mu.Unlock()
	var errs []error
	for _, id := range ids {
		errs = append(errs, t.Remove(ctx, id))
	}
	return errors.Join(errs...)
}

// Reopen undoes Close, but for the commands that were killed.
func (t *Table) Reopen() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = false
}
