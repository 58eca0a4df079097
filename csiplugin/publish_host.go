package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// publishHost carries out a publish on the host that [planPublish] has allowed. If it is in effect already, nothing is
// done. If it fails, it is undone in full.
func (n *node) publishHost(ctx context.Context, v catalog.Volume, state catalog.Node, want catalog.Publish, flags []string) error {
	if old, repeat := state.Publishes[want.Target]; repeat && old.Same(want) {
		if done, err := n.inEffect(v, want); done || err != nil {
			return err
		}
	}
	if err := hostmount.CheckTarget(want.Target, want.Kind == catalog.Block); err != nil {
		return err
	}
	if m, err := hostmount.At(want.Target); err != nil || m != nil {
		return errors.Join(err, precondition("target path %s is a mount of something else; unmount it", want.Target))
	}
	if _, err := n.stat(ctx, v); err != nil {
		return err
	}
	if err := n.free(ctx, v, state); err != nil {
		return err
	}
	if err := n.catalog.Reserve(); err != nil {
		return err
	}
	want.State = catalog.Publishing
	if err := n.putPublish(v, &state, want); err != nil {
		return err
	}
	crashpoint.At(ctx, "publish intended")
	err := n.setUp(ctx, v, &state, want, flags)
	if err == nil {
		want.State = catalog.Published
		err = n.putPublish(v, &state, want)
	}
	if err != nil {
		undo, cancel := undoContext(ctx)
		defer cancel()
		return errors.Join(err, n.takeDown(undo, v, &state, want))
	}
	crashpoint.At(ctx, "publish recorded")
	return nil
}

// inEffect reports whether a publish is what is mounted at its target.
func (n *node) inEffect(v catalog.Volume, p catalog.Publish) (bool, error) {
	devices, err := loopdev.Find(n.path(v))
	if err != nil {
		return false, err
	}
	m, err := hostmount.At(p.Target)
	if err != nil || m == nil {
		return false, err
	}
	if p.Kind == catalog.Mount {
		return loopdev.Holds(devices, m.Dev) && m.Root == "/" && (m.ReadOnly || !p.ReadOnly), nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(p.Target, &st); err != nil {
		return false, fmt.Errorf("device at %s: %w", p.Target, err)
	}
	return st.Mode&unix.S_IFMT == unix.S_IFBLK && loopdev.Holds(withMode(devices, p.ReadOnly), st.Rdev), nil
}

// setUp does what a publish on the host consists of. It can be repeated.
func (n *node) setUp(ctx context.Context, v catalog.Volume, state *catalog.Node, p catalog.Publish, flags []string) error {
	source := p.Staging
	var err error
	if p.Kind == catalog.Block {
		source, err = n.attachBlock(ctx, v, state, p)
	} else {
		err = n.mountStaging(ctx, v, state, p, flags)
	}
	if err != nil {
		return err
	}
	if err := giveToGroup(ctx, p); err != nil {
		return err
	}
	if err := hostmount.MakeTarget(p.Target, p.Kind == catalog.Block); err != nil {
		return err
	}
	crashpoint.At(ctx, "target made")
	if err := hostmount.Bind(source, p.Target, p.ReadOnly && p.Kind == catalog.Mount); err != nil {
		return err
	}
	crashpoint.At(ctx, "target bound")
	return nil
}

func giveToGroup(ctx context.Context, p catalog.Publish) error {
	if p.Group == "" || p.ReadOnly {
		return nil
	}
	gid, err := strconv.Atoi(p.Group)
	if err != nil {
		return fmt.Errorf("group %q: %w: %w", p.Group, err, errdefs.ErrInternal)
	}
	return hostmount.GiveToGroup(ctx, p.Staging, gid)
}

// attachBlock returns a device of the volume that stays until it is detached: one that is there, or a new one. Before
// anybody gets to write to it, the fragment of a format goes: later it could not be told from data.
func (n *node) attachBlock(ctx context.Context, v catalog.Volume, state *catalog.Node, p catalog.Publish) (string, error) {
	if err := n.eraseFragment(ctx, v, state); err != nil {
		return "", err
	}
	if err := n.formatted(ctx, v, state); err != nil {
		return "", err
	}
	devices, err := loopdev.Find(n.path(v))
	if err != nil {
		return "", err
	}
	if there := withMode(devices, p.ReadOnly); len(there) > 0 && there[0].Passing {
		return "", precondition("loop device %s of volume %s is about to be detached; try again", there[0].Path, v.ID)
	} else if len(there) > 0 {
		return there[0].Path, nil
	}
	dev, err := loopdev.Attach(ctx, n.path(v), loopdev.Options{ReadOnly: p.ReadOnly, Lasting: true})
	if err != nil {
		return "", err
	}
	n.warnCached(ctx, v, dev)
	crashpoint.At(ctx, "device attached")
	return dev.Path, dev.Close()
}

func withMode(devices []loopdev.Attached, readOnly bool) []loopdev.Attached {
	var found []loopdev.Attached
	for _, d := range devices {
		if d.ReadOnly == readOnly {
			found = append(found, d)
		}
	}
	return found
}

func (n *node) warnCached(ctx context.Context, v catalog.Volume, dev *loopdev.Device) {
	if !dev.Direct {
		rpc.Logger(ctx).WarnContext(ctx, "the pool's filesystem cannot do direct I/O: the volume's data is cached twice",
			rpc.LogVolume, v.ID.String(), rpc.LogDevice, dev.Path)
	}
}
