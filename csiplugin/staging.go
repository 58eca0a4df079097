package csiplugin

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// mountStaging mounts a volume at its staging path, unless it is mounted there, and makes its filesystem, if it is blank
// and may be written to.
func (n *node) mountStaging(ctx context.Context, v catalog.Volume, state *catalog.Node, p catalog.Publish, flags []string) error {
	mounted, err := n.staged(v, p)
	if err != nil {
		return err
	}
	if !mounted {
		if err := n.eraseFragment(ctx, v, state); err != nil {
			return err
		}
		if err := n.mountVolume(ctx, v, state, p, flags); err != nil {
			return err
		}
		crashpoint.At(ctx, "staging path mounted")
	}
	return n.formatted(ctx, v, state)
}

// staged reports whether the volume is mounted at its staging path. Something else there, or a device of the volume that
// is not for this mount, is ErrFailedPrecondition.
func (n *node) staged(v catalog.Volume, p catalog.Publish) (bool, error) {
	if err := checkStaging(p.Staging); err != nil {
		return false, err
	}
	devices, err := loopdev.Find(n.path(v))
	if err != nil {
		return false, err
	}
	m, err := hostmount.At(p.Staging)
	switch {
	case err != nil:
		return false, err
	case m != nil && loopdev.Holds(devices, m.Dev):
		return true, nil
	case m != nil:
		return false, precondition("staging_target_path %s is a mount of something else; unmount it", p.Staging)
	}
	if len(devices) > 0 {
		return false, precondition("volume %s is attached to %s, but not mounted at %s; unmount it where it is mounted", v.ID, devices[0].Path, p.Staging)
	}
	return false, nil
}

// eraseFragment erases what an interrupted format has left. Nothing but that format has written to the volume since it was
// blank, or else the catalog would not say so.
func (n *node) eraseFragment(ctx context.Context, v catalog.Volume, state *catalog.Node) error {
	if !state.Formatting {
		return nil
	}
	rpc.Logger(ctx).WarnContext(ctx, "the making of a filesystem was interrupted before its first use; it is made again", rpc.LogVolume, v.ID.String())
	if err := n.engine.Erase(ctx, object(v.ID)); err != nil {
		return err
	}
	crashpoint.At(ctx, "fragment erased")
	return nil
}

// formatted notes that no filesystem is being made any more: it is mounted, or its fragment is gone.
func (n *node) formatted(ctx context.Context, v catalog.Volume, state *catalog.Node) error {
	if !state.Formatting {
		return nil
	}
	state.Formatting = false
	if err := n.catalog.PutNode(v.ID, *state); err != nil {
		return err
	}
	crashpoint.At(ctx, "end of the format recorded")
	return nil
}

// mountVolume attaches a volume and mounts it. The device goes with the mount, or, without one, at once.
func (n *node) mountVolume(ctx context.Context, v catalog.Volume, state *catalog.Node, p catalog.Publish, flags []string) (err error) {
	st, err := n.stat(ctx, v)
	if err != nil {
		return err
	}
	// The device is writable even for a read-only mount: the filesystem may have to replay its journal.
	dev, err := loopdev.Attach(ctx, n.path(v), loopdev.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	n.warnCached(ctx, v, dev)
	crashpoint.At(ctx, "device attached")
	found, err := hostmount.Probe(ctx, dev.Path)
	if err != nil {
		return err
	}
	format, err := planFormat(v, p, found, st.NeverWritten)
	if err != nil {
		return err
	}
	fs := hostmount.Filesystem{Device: dev.Path, Target: p.Staging, Type: p.Use.FSType, Flags: flags, ReadOnly: p.ReadOnly && !sharable(p)}
	if !format {
		if err := fs.Mount(ctx); err != nil {
			return n.blame(ctx, err)
		}
		return n.fill(ctx, v, fs)
	}
	state.Formatting = true
	if err := n.catalog.PutNode(v.ID, *state); err != nil {
		return err
	}
	crashpoint.At(ctx, "format intended")
	return n.blame(ctx, fs.Format(ctx))
}

// sharable reports whether a volume can be published at several targets, of which some may be for writing.
func sharable(p catalog.Publish) bool {
	return p.Use.Mode == int32(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER)
}

// planFormat decides whether a filesystem has to be made, given what blkid finds and whether the volume was ever written.
// A volume that holds something else, or something that nobody knows, is ErrFailedPrecondition and stays as it is.
func planFormat(v catalog.Volume, p catalog.Publish, found string, neverWritten bool) (bool, error) {
	switch {
	case found == p.Use.FSType:
		return false, nil
	case found != "":
		return false, precondition("volume %s holds %q instead of %s and is left as it is; save what is needed from it and make a new volume", v.ID, found, p.Use.FSType)
	case !neverWritten:
		return false, precondition("volume %s holds no filesystem, but it was written to: it may hold data of another kind, and is not formatted; if the data is not needed, make a new volume", v.ID)
	case p.ReadOnly:
		return false, precondition("volume %s is blank, and a read-only publish does not make a filesystem; publish it for writing first", v.ID)
	}
	return true, nil
}

// fill makes a filesystem as large as its volume, which may have grown while it was not mounted. That a clone is too small
// is an error (CSI, CreateVolume); otherwise NodeExpandVolume tries again.
func (n *node) fill(ctx context.Context, v catalog.Volume, fs hostmount.Filesystem) error {
	if fs.ReadOnly || hostmount.AsksReadOnly(fs.Flags) {
		return nil
	}
	err := fs.Grow(ctx)
	if err == nil {
		return nil
	}
	if v.Source != "" || ctx.Err() != nil {
		return errors.Join(err, hostmount.Clear(ctx, fs.Target, func(*hostmount.Mount) bool { return true }))
	}
	rpc.Logger(ctx).WarnContext(ctx, "the filesystem could not be made as large as its volume", rpc.LogVolume, v.ID.String(), rpc.LogError, err)
	return nil
}
