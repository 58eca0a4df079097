package deferrals

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/runtimehandler"
)

// Request is a volume to publish.
type Request struct {
	Driver     string
	VolumeID   string
	TargetPath string
	ReadOnly   bool
	// Handler is the name of the handler whose runtime will mount the volume.
	Handler string
	// Pod is the pod that the volume is for, as far as it is known.
	Pod journal.Pod
	// Group is a group to give the files to, if the storage says none, and GroupChangePolicy when.
	Group             *uint32
	GroupChangePolicy runtimehandler.GroupChangePolicy
	// SubPaths says that a container will see a part of the volume only.
	SubPaths bool
	// Digest stands for all of the request that makes it the same request when it comes again; never for secrets.
	Digest string
}

// Publish makes a volume ready for a sandbox to mount: durably recorded, published by its storage, handed to the
// handlers, its target path sealed. The same request again is a cheap success; another one for the same target path
// is ErrAlreadyExists. If it fails, everything was undone, because the caller may never call Unpublish; if that failed
// too, the error is ErrUnavailable, after which the caller has to call again or to unpublish.
func (m *Manager) Publish(ctx context.Context, req Request, storage Storage) error {
	handler, err := m.handler(req.Handler)
	if err != nil {
		return fmt.Errorf("volume %s: %w", req.VolumeID, err)
	}
	unlock, err := m.locks.Lock(ctx, req.TargetPath)
	if err != nil {
		return err
	}
	defer unlock()

	if rec, ok := m.journal.Get(req.TargetPath); ok {
		if err := repeats(rec, req); err != nil {
			return err
		}
		if rec.State == journal.Published {
			return seal.Make(req.TargetPath)
		}
	} else if err := seal.Vacant(req.TargetPath); err != nil {
		return err
	}
	intent := journal.Record{
		State:    journal.Publishing,
		Request:  req.Digest,
		Handler:  req.Handler,
		Created:  time.Now().UTC(),
		Pod:      req.Pod,
		Deferral: runtimehandler.Deferral{Driver: req.Driver, VolumeID: req.VolumeID, TargetPath: req.TargetPath, ReadOnly: req.ReadOnly},
	}
	if err := m.journal.Put(oneWriter(intent.Deferral), intent); err != nil {
		return err
	}
	crashpoint.At(ctx, "publish: intended")
	if err := m.publish(ctx, intent, req, handler, storage); err != nil {
		return m.undoPublish(ctx, intent, storage, err)
	}
	m.published()
	return nil
}

// repeats checks that a request for an existing record is the one that made it.
func repeats(rec journal.Record, req Request) error {
	old := rec.Deferral
	switch {
	case old.Driver != req.Driver || old.VolumeID != req.VolumeID:
		return fmt.Errorf("target path %s belongs to volume %s of %s: %w", req.TargetPath, old.VolumeID, old.Driver, errdefs.ErrAlreadyExists)
	case rec.Host:
		return fmt.Errorf("volume %s is mounted on the host at %s; unpublish it first: %w", req.VolumeID, req.TargetPath, errdefs.ErrAlreadyExists)
	case rec.Request != req.Digest:
		return fmt.Errorf("volume %s is published at %s with other arguments; unpublish it first: %w", req.VolumeID, req.TargetPath, errdefs.ErrAlreadyExists)
	case rec.State == journal.Unpublishing:
		return fmt.Errorf("volume %s is being unpublished from %s; finish that first: %w", req.VolumeID, req.TargetPath, errdefs.ErrAborted)
	}
	return nil
}

// publish acts on an intent and commits it.
func (m *Manager) publish(ctx context.Context, rec journal.Record, req Request, handler runtimehandler.Handler, storage Storage) error {
	d, err := storage.Publish(ctx)
	if err != nil {
		return err
	}
	if d.Group == nil {
		d.Group = req.Group
	}
	d.GroupChangePolicy = max(d.GroupChangePolicy, req.GroupChangePolicy)
	crashpoint.At(ctx, "publish: published by the storage")
	if d.Device, d.SizeBytes, err = resolveDevice(d.Device, d.SizeBytes, m.deviceRoots); err != nil {
		return fmt.Errorf("volume %s: %w", d.VolumeID, err)
	}
	if err := errors.Join(unusedByHost(d), able(handler, d, req.SubPaths)); err != nil {
		return err
	}
	if err := seal.Make(d.TargetPath); err != nil {
		return err
	}
	crashpoint.At(ctx, "publish: sealed")
	if rec.ResolvedTarget, err = filepath.EvalSymlinks(d.TargetPath); err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	if err := handler.Stage(ctx, d); err != nil {
		return fmt.Errorf("handler %s: stage %s: %w", rec.Handler, d.TargetPath, err)
	}
	crashpoint.At(ctx, "publish: staged")
	rec.State, rec.Deferral = journal.Published, d
	if err := m.journal.Put(oneWriter(d), rec); err != nil {
		return err
	}
	crashpoint.At(ctx, "publish: committed")
	return nil
}

// able refuses what the runtime cannot do for a volume; nothing is done on the host instead.
func able(handler runtimehandler.Handler, d runtimehandler.Deferral, subPaths bool) error {
	can := handler.Capabilities()
	lacks := func(what, cure string) error {
		return fmt.Errorf("volume %s needs %s, which runtime handler %s cannot do: %s: %w", d.VolumeID, what, handler.Name(), cure, errdefs.ErrFailedPrecondition)
	}
	switch {
	case d.Format && d.Blankness == runtimehandler.BlanknessNeverWritten && !can.Format:
		return lacks("a filesystem to be made", "use another handler, or a volume that has one")
	case d.Group != nil && !d.ReadOnly && !can.Group:
		return lacks("its files to be given to group "+strconv.FormatUint(uint64(*d.Group), 10), "use another handler, or leave out the pod's fsGroup")
	case subPaths && !can.SubPath:
		return lacks("a part of it to be mounted (subPath)", "use another handler, or mount the whole volume")
	}
	return nil
}

// undoPublish takes back whatever a failed publish may have done, and returns the error for the caller.
func (m *Manager) undoPublish(ctx context.Context, rec journal.Record, storage Storage, cause error) error {
	ctx, cancel := undoContext(ctx)
	defer cancel()
	if undo := m.takeBack(ctx, rec, storage); undo != nil {
		return fmt.Errorf("%v; undoing it failed as well: %v; publish or unpublish again: %w", cause, undo, errdefs.ErrUnavailable)
	}
	return cause
}

// takeBack removes all traces of a deferral that no sandbox holds, the record last. It goes on after an error, but
// keeps the record then.
func (m *Manager) takeBack(ctx context.Context, rec journal.Record, storage Storage) error {
	target := rec.Deferral.TargetPath
	handler, err := m.handler(rec.Handler)
	if err != nil {
		return err
	}
	unstageErr := handler.Unstage(ctx, target)
	crashpoint.At(ctx, "take back: unstaged")
	sealErr := seal.Remove(target)
	crashpoint.At(ctx, "take back: unsealed")
	storageErr := storage.Unpublish(ctx, !rec.Mounted)
	crashpoint.At(ctx, "take back: unpublished by the storage")
	if err := errors.Join(unstageErr, sealErr, storageErr); err != nil {
		return err
	}
	if err := m.journal.Delete(target); err != nil {
		return err
	}
	crashpoint.At(ctx, "take back: forgotten")
	return nil
}

// oneWriter returns the guard that keeps a volume, or a device under whatever name, from two users one of whom
// may write.
func oneWriter(d runtimehandler.Deferral) func(journal.Record) error {
	return func(existing journal.Record) error {
		other := existing.Deferral
		if d.ReadOnly && other.ReadOnly {
			return nil
		}
		if existing.Host && existing.State == journal.Published && !onHost(other.TargetPath) {
			return nil // the kubelet does not unpublish after a reboot what it no longer wants
		}
		switch {
		case other.Driver == d.Driver && other.VolumeID == d.VolumeID && existing.Host:
			return fmt.Errorf("volume %s is mounted on the host at %s, and a filesystem that a sandbox mounts can have one user only: "+
				"delete the pod that uses it there first: %w", d.VolumeID, other.TargetPath, errdefs.ErrFailedPrecondition)
		case other.Driver == d.Driver && other.VolumeID == d.VolumeID:
			return fmt.Errorf("volume %s is already published at %s, and a filesystem that a sandbox mounts can have one user only: "+
				"use access mode ReadWriteOncePod, and delete the other pod first: %w", d.VolumeID, other.TargetPath, errdefs.ErrFailedPrecondition)
		case d.Device != "" && sameDevice(other.Device, d.Device):
			return fmt.Errorf("device %s of volume %s is that of volume %s of %s, published at %s: one device can have one user only: %w",
				d.Device, d.VolumeID, other.VolumeID, other.Driver, other.TargetPath, errdefs.ErrFailedPrecondition)
		}
		return nil
	}
}
