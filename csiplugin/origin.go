package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/loopdev"
)

// origin is what a volume is made from, held as it is until release: the zero source is nothing, whose size is 0.
type origin struct {
	object  engine.Name
	size    int64
	fsType  string
	release func()
	// settle brings what the host has in its caches to the object.
	settle func(context.Context) error
}

// origin finds a source and holds it. ErrNotFound if it does not exist; ErrResourceExhausted if it is in another pool, which has
// csi-provisioner choose another node for a claim that waits for its first consumer.
func (s *store) origin(ctx context.Context, source handle.Handle) (origin, error) {
	if source.Kind() != "" && source.Pool() != s.pool {
		return origin{}, fmt.Errorf("source %s is in pool %s, and a copy can only be made there, not in pool %s; have the pod scheduled to the node of that pool, "+
			"or make the copy's source anew in this one: %w", source, source.Pool(), s.pool, errdefs.ErrResourceExhausted)
	}
	switch source.Kind() {
	case handle.KindVolume:
		v, release, err := s.hold(ctx, handle.Volume{Handle: source})
		if err != nil {
			return origin{}, err
		}
		from := origin{object: object(v.ID), size: v.Size, fsType: v.FSType, release: release}
		from.settle = func(ctx context.Context) error { return s.cuttable(ctx, v) }
		return from, nil
	case handle.KindSnapshot:
		snap, release, err := s.holdSnapshot(handle.Snapshot{Handle: source})
		if err != nil {
			return origin{}, err
		}
		nothing := func(context.Context) error { return nil }
		return origin{object: object(snap.ID), size: snap.Size, fsType: snap.FSType, release: release, settle: nothing}, nil
	}
	return origin{release: func() {}}, nil
}

// holdSnapshot keeps a snapshot that exists from being deleted, together with others who do so.
func (s *store) holdSnapshot(id handle.Snapshot) (snap catalog.Snapshot, release func(), err error) {
	if err := id.In(s.pool); err != nil {
		return snap, nil, err
	}
	if release, err = s.locks.share("snapshot " + id.String()); err != nil {
		return snap, nil, err
	}
	if snap, err = s.lookSnapshot(id); err != nil {
		release()
		return snap, nil, err
	}
	return snap, release, nil
}

// cuttable prepares a volume that is held for being cloned: its data is there, no fragment of a filesystem is in it, and
// what the host's caches have of it is written.
//
// What a sandbox has in its own caches stays there: a clone is what would be left after a power failure, unless somebody
// freezes the filesystem.
func (s *store) cuttable(ctx context.Context, v catalog.Volume) error {
	if _, err := s.stat(ctx, v); err != nil {
		return err
	}
	n, err := s.catalog.Node(v.ID)
	if err != nil {
		return err
	}
	if n.Formatting {
		return precondition("the making of volume %s's filesystem was interrupted; publish it once, then its filesystem is whole", v.ID)
	}
	return s.blame(ctx, s.flush(v, n))
}

// flush writes what the host's caches have of a volume that is published on the host: first the filesystem's, then the
// device's.
func (s *store) flush(v catalog.Volume, n catalog.Node) error {
	ours, err := s.ours(v)
	if err != nil {
		return err
	}
	if n.Staged != nil {
		if m, err := hostmount.At(n.Staged.Path); err != nil {
			return err
		} else if m != nil && ours(m) {
			if err := withFile(n.Staged.Path, unix.Syncfs); err != nil {
				return fmt.Errorf("write back the filesystem of volume %s: %w", v.ID, err)
			}
		}
	}
	devices, err := loopdev.Find(s.path(v))
	if err != nil {
		return err
	}
	for _, d := range devices {
		err := withFile(d.Path, unix.Fsync)
		if err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, os.ErrNotExist) { // it was detached just now
			return fmt.Errorf("write back device %s of volume %s: %w", d.Path, v.ID, err)
		}
	}
	return nil
}

func withFile(path string, do func(fd int) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(do(int(f.Fd())), f.Close())
}

// lookSnapshot reads a snapshot that is ready. ErrNotFound for one that is just being made or deleted.
func (s *store) lookSnapshot(id handle.Snapshot) (catalog.Snapshot, error) {
	if err := id.In(s.pool); err != nil {
		return catalog.Snapshot{}, err
	}
	snap, err := s.catalog.Snapshot(id)
	if err == nil && snap.State != catalog.Ready {
		err = fmt.Errorf("snapshot %s: %w", id, errdefs.ErrNotFound)
	}
	return snap, err
}
