package csiplugin

import (
	"context"
	"strings"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// takeDown undoes a publish, whatever of it was done, and removes its record. With the last publish on the host everything
// goes that they had in common.
func (s *store) takeDown(ctx context.Context, v catalog.Volume, state *catalog.Node, p catalog.Publish) error {
	var err error
	if p.Kind == catalog.Deferred {
		err = s.endDeferred(ctx, v, p)
	} else {
		err = s.endHost(ctx, v, *state, p)
	}
	if err != nil {
		return err
	}
	crashpoint.At(ctx, "publish taken down")
	delete(state.Publishes, p.Target)
	if err := s.catalog.PutNode(v.ID, *state); err != nil {
		return err
	}
	crashpoint.At(ctx, "unpublish recorded")
	return nil
}

func (s *store) endHost(ctx context.Context, v catalog.Volume, state catalog.Node, p catalog.Publish) error {
	ours, err := s.ours(v)
	if err != nil {
		return err
	}
	if err := hostmount.Clear(ctx, p.Target, ours); err != nil {
		return err
	}
	crashpoint.At(ctx, "target unmounted")
	if err := hostmount.RemoveTarget(p.Target); err != nil {
		return err
	}
	crashpoint.At(ctx, "target removed")
	for target, other := range state.Publishes {
		if target != p.Target && other.Kind != catalog.Deferred && other.Boot == s.boot {
			return nil
		}
	}
	return s.clearStaging(ctx, v, p.Staging)
}

// endDeferred takes back a volume from a sandbox: erases it, if that was intended.
func (s *store) endDeferred(ctx context.Context, v catalog.Volume, p catalog.Publish) error {
	if !p.Erase {
		return nil
	}
	return s.engine.Erase(ctx, object(v.ID))
}

// clearStaging unmounts a staging path and detaches the volume's devices, which fails if the volume is mounted elsewhere,
// or beneath something else. What is mounted there of others stays.
func (s *store) clearStaging(ctx context.Context, v catalog.Volume, staging string) error {
	ours, err := s.ours(v)
	if err != nil {
		return err
	}
	if err := hostmount.Clear(ctx, staging, ours); err != nil {
		return err
	}
	crashpoint.At(ctx, "staging path unmounted")
	return loopdev.Detach(ctx, s.path(v))
}

// ours returns what tells a volume's mounts from others. A device node that was bound is a volume's if it is a loop
// device's: which one cannot be told any more once it is detached.
func (s *store) ours(v catalog.Volume) (func(*hostmount.Mount) bool, error) {
	devices, err := loopdev.Find(s.path(v))
	if err != nil {
		return nil, err
	}
	return func(m *hostmount.Mount) bool {
		return loopdev.Holds(devices, m.Dev) || v.Block && strings.HasPrefix(m.Root, "/loop") && (m.FSType == "devtmpfs" || m.FSType == "tmpfs")
	}, nil
}
