package csiplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/pool"
)

// Repaired is what [Repair] has found.
type Repaired struct {
	// Volumes, Snapshots, Groups and Images are how many records were made; what the catalog knew is not counted.
	Volumes, Snapshots, Groups, Images int
	// Bases are snapshots that were deleted and are kept to be compared with; those that the catalog knew are counted, too.
	Bases int
	// Guessed are volumes that nothing was noted with: their names are "recovered-" and the id, their filesystems are what
	// blkid finds, and their parameters are lost.
	Guessed []string
	// Unknown are files that are no objects of this pool. They were left alone.
	Unknown []string
	// Aside is where the damaged catalog was moved to, empty if there was none.
	Aside string
}

// Repair rebuilds the catalog of a pool that no plugin serves, from what is noted with each object, and finds objects again
// that a good catalog does not know. Volumes, snapshots and group snapshots come back with their names, sizes, sources and
// parameters. What cannot be rebuilt is where volumes are staged and published: have them unpublished first, or reboot.
//
// A snapshot of a group of which not all are left comes back as one by itself. Errors are those of [pool.Rebuild].
func Repair(ctx context.Context, poolDir string, log *slog.Logger) (Repaired, error) {
	var found Repaired
	aside, err := pool.Rebuild(ctx, pool.Config{Dir: poolDir, Log: log}, func(objects string, id handle.Pool, c *catalog.Catalog) error {
		e, err := reflink.Open(objects)
		if err != nil {
			return err
		}
		r := repair{engine: e, pool: id, catalog: c, found: &found, groups: map[handle.Group]catalog.Group{}, members: map[handle.Group][]catalog.Snapshot{}}
		return r.run(ctx)
	})
	found.Aside = aside
	return found, err
}

type repair struct {
	engine  engine.Engine
	pool    handle.Pool
	catalog *catalog.Catalog
	found   *Repaired
	groups  map[handle.Group]catalog.Group
	members map[handle.Group][]catalog.Snapshot
}

func (r *repair) run(ctx context.Context) error {
	names, err := r.engine.Names(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		h, err := handle.Parse(string(name))
		if err == nil {
			err = h.In(r.pool)
		}
		if err != nil || h.Kind() == handle.KindGroup {
			r.found.Unknown = append(r.found.Unknown, string(name))
			continue
		}
		if err := r.object(ctx, name, h); err != nil {
			return fmt.Errorf("object %s: %w", name, err)
		}
	}
	return r.putGroups()
}

// object makes the record of an object that has none.
func (r *repair) object(ctx context.Context, name engine.Name, h handle.Handle) error {
	st, err := r.engine.Stat(ctx, name)
	if err != nil {
		return err
	}
	raw, err := r.engine.Label(ctx, name)
	if err != nil {
		return err
	}
	var l label
	if err := json.Unmarshal(raw, &l); err != nil {
		l = label{} // nothing was noted, or it is damaged
	}
	switch {
	case h.Kind() == handle.KindImage:
		return r.image(name, h, l.Image, st)
	case h.Kind() == handle.KindVolume:
		id := handle.Volume{Handle: h}
		if _, err := r.catalog.Volume(id); !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
		return r.volume(ctx, id, l.Volume, st)
	case l.Base != nil && l.Base.ID.Handle == h:
		r.found.Bases++
		return r.catalog.KeepBase(*l.Base)
	case l.Snapshot == nil || l.Snapshot.ID.Handle != h:
		r.found.Unknown = append(r.found.Unknown, string(name))
		return nil
	}
	if _, err := r.catalog.Snapshot(l.Snapshot.ID); !errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	return r.snapshot(*l.Snapshot, l.Group, st)
}

// image makes the record of a backing image. One without a note was not whole yet; its data is of no use to anybody.
func (r *repair) image(name engine.Name, h handle.Handle, noted *catalog.Image, st engine.Stat) error {
	if noted == nil || noted.ID.Handle != h || noted.Size != st.Size {
		r.found.Unknown = append(r.found.Unknown, string(name))
		return nil
	}
	if _, err := r.catalog.Image(noted.ID); !errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	r.found.Images++
	err := r.catalog.PutImage(*noted)
	if errors.Is(err, errdefs.ErrAlreadyExists) {
		noted.Name = "recovered-" + noted.ID.String()
		err = r.catalog.PutImage(*noted)
	}
	return err
}

func (r *repair) volume(ctx context.Context, id handle.Volume, noted *catalog.Volume, st engine.Stat) error {
	v := catalog.Volume{ID: id, Name: "recovered-" + id.String(), Block: true, Created: time.Now().UTC()}
	if noted != nil && noted.ID == id {
		v = *noted
	} else {
		fs, err := hostmount.Probe(ctx, r.engine.Path(object(id)))
		if err != nil && ctx.Err() != nil {
			return err
		}
		if minimum[fs] > 0 {
			v.FSType = fs
		}
		r.found.Guessed = append(r.found.Guessed, id.String())
	}
	v.State, v.Size, v.Expanding = catalog.Ready, st.Size, 0
	err := r.catalog.PutVolume(v)
	if errors.Is(err, errdefs.ErrAlreadyExists) { // two have one name: one was just being deleted
		v.Name = "recovered-" + id.String()
		err = r.catalog.PutVolume(v)
	}
	r.found.Volumes++
	return err
}

func (r *repair) snapshot(snap catalog.Snapshot, group *catalog.Group, st engine.Stat) error {
	snap.State, snap.Size = catalog.Ready, st.Size
	if group != nil && group.ID == snap.Group {
		r.groups[group.ID] = *group
		r.members[group.ID] = append(r.members[group.ID], snap)
		return nil
	}
	r.found.Snapshots++
	err := r.catalog.PutSnapshot(snap)
	if errors.Is(err, errdefs.ErrAlreadyExists) {
		snap.Name = "recovered-" + snap.ID.String()
		err = r.catalog.PutSnapshot(snap)
	}
	return err
}

// putGroups makes the records of the group snapshots that are whole, and of what is left of the others.
func (r *repair) putGroups() error {
	for id, group := range r.groups {
		members := r.members[id]
		if len(members) == len(group.Members) {
			group.State = catalog.Ready
			if err := r.catalog.PutGroup(group, members); err != nil {
				return err
			}
			r.found.Groups++
			r.found.Snapshots += len(members)
			continue
		}
		for _, snap := range members {
			snap.Group, snap.Name = handle.Group{}, "recovered-"+snap.ID.String()
			if err := r.catalog.PutSnapshot(snap); err != nil {
				return err
			}
			r.found.Snapshots++
		}
	}
	return nil
}

// Print writes what was found, for people.
func (r Repaired) Print(w io.Writer) {
	fmt.Fprintf(w, "records made: %d volumes, %d snapshots, %d group snapshots, %d backing images\n", r.Volumes, r.Snapshots, r.Groups, r.Images)
	if r.Bases > 0 {
		fmt.Fprintf(w, "%d deleted snapshots are kept to be compared with\n", r.Bases)
	}
	for _, id := range r.Guessed {
		fmt.Fprintf(w, "%s: nothing was noted with it; its name and parameters are lost\n", id)
	}
	for _, name := range r.Unknown {
		fmt.Fprintf(w, "%s: not an object of this pool, left alone\n", name)
	}
	if r.Aside != "" {
		fmt.Fprintf(w, "the damaged catalog is now %s\n", r.Aside)
	}
}
