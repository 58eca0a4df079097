package csiplugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing/images"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
)

// store is what the RPCs share.
type store struct {
	catalog *catalog.Catalog
	engine  engine.Engine
	changes engine.Changes
	pool    handle.Pool
	// boot is the boot id that records are marked with.
	boot        string
	topologyKey string
	locks       *locks
	jobs        *jobs
	quiet       *consistency
	images      *images.Store
}

// object is the name under which the engine keeps a volume or a snapshot.
func object(id interface{ String() string }) engine.Name { return engine.Name(id.String()) }

// path is where a volume's data is.
func (s *store) path(v catalog.Volume) string { return s.engine.Path(object(v.ID)) }

// parseID reads a volume_id. ErrNotFound if it is not one of this pool's; see [handle.ForeignError].
func (s *store) parseID(text string) (handle.Volume, error) {
	id, err := handle.ParseVolume(text)
	if err != nil {
		return id, err
	}
	return id, id.In(s.pool)
}

// lock locks a volume. ErrAborted if another call has it.
func (s *store) lock(id handle.Volume) (release func(), err error) {
	return s.locks.try("volume " + id.String())
}

// enter locks a volume that exists and finishes what was left undone with it. The caller calls release once.
func (s *store) enter(ctx context.Context, text string) (v catalog.Volume, release func(), err error) {
	id, err := s.parseID(text)
	if err != nil {
		return v, nil, err
	}
	release, err = s.lock(id)
	if err != nil {
		return v, nil, err
	}
	v, err = s.settled(ctx, id)
	if err != nil {
		release()
		return v, nil, err
	}
	return v, release, nil
}

// hold keeps a volume that exists as it is, together with others who do so: it is not deleted, expanded, published or
// unpublished meanwhile. The caller calls release once.
func (s *store) hold(ctx context.Context, id handle.Volume) (v catalog.Volume, release func(), err error) {
	if err := id.In(s.pool); err != nil {
		return v, nil, err
	}
	if v, err = s.catalog.Volume(id); err != nil {
		return v, nil, err
	}
	if !settledVolume(v) {
		_, finish, err := s.enter(ctx, id.String())
		if err != nil {
			return v, nil, err
		}
		finish()
	}
	if release, err = s.locks.share("volume " + id.String()); err != nil {
		return v, nil, err
	}
	v, err = s.catalog.Volume(id)
	if err == nil && !settledVolume(v) {
		err = busy("volume " + id.String())
	}
	if err != nil {
		release()
		return v, nil, err
	}
	return v, release, nil
}

func settledVolume(v catalog.Volume) bool { return v.State == catalog.Ready && v.Expanding == 0 }

// settled returns a volume after finishing what was left undone with it. ErrNotFound if it does not exist, or not any
// more.
func (s *store) settled(ctx context.Context, id handle.Volume) (catalog.Volume, error) {
	v, err := s.catalog.Volume(id)
	if err != nil {
		return v, err
	}
	return s.settleVolume(ctx, v)
}

// look reads what is recorded of a volume, without a lock: for calls that change nothing. ErrNotFound for a volume that is
// just being made or deleted.
func (s *store) look(text string) (v catalog.Volume, state catalog.Node, err error) {
	id, err := s.parseID(text)
	if err != nil {
		return v, state, err
	}
	if v, err = s.catalog.Volume(id); err != nil {
		return v, state, err
	}
	if v.State != catalog.Ready {
		return v, state, fmt.Errorf("volume %s: %w", id, errdefs.ErrNotFound)
	}
	state, err = s.catalog.Node(id)
	return v, state, err
}

// stat asks the engine for a volume's data. That it is gone, or shorter than it was made, is ErrDataLoss: the catalog
// knows better, and a CO must not read it as "there is no such volume".
func (s *store) stat(ctx context.Context, v catalog.Volume) (engine.Stat, error) {
	st, err := s.engine.Stat(ctx, object(v.ID))
	if errors.Is(err, errdefs.ErrNotFound) {
		return st, fmt.Errorf("the data of volume %s is gone: %v: %w", v.ID, err, errdefs.ErrDataLoss)
	}
	if err == nil && st.Size < v.Size {
		err = fmt.Errorf("volume %s has %d bytes of data, it was made with %d: %w", v.ID, st.Size, v.Size, errdefs.ErrDataLoss)
	}
	return st, err
}

// statSnapshot is [store.stat] for a snapshot.
func (s *store) statSnapshot(ctx context.Context, snap catalog.Snapshot) (engine.Stat, error) {
	st, err := s.engine.Stat(ctx, object(snap.ID))
	if errors.Is(err, errdefs.ErrNotFound) {
		return st, fmt.Errorf("the data of snapshot %s is gone: %v: %w", snap.ID, err, errdefs.ErrDataLoss)
	}
	if err == nil && st.Size != snap.Size {
		err = fmt.Errorf("snapshot %s has %d bytes of data, it was cut with %d: %w", snap.ID, st.Size, snap.Size, errdefs.ErrDataLoss)
	}
	return st, err
}

// fullPool is how little free space, in bytes, explains that something could not be written.
const fullPool = 4 << 20

// blame adds ErrResourceExhausted to the error of a tool that cannot say so itself, if the pool is full.
func (s *store) blame(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	c, statErr := s.engine.Capacity(ctx)
	if statErr != nil {
		rpc.Logger(ctx).WarnContext(ctx, "the pool's capacity cannot be told", rpc.LogError, statErr)
		return err
	}
	if c.Free < fullPool {
		return fmt.Errorf("the pool is full, %d bytes are free: %v: %w", c.Free, err, errdefs.ErrResourceExhausted)
	}
	return err
}
