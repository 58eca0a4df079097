package deferrals

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/process"
	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/runtimehandler"
)

// Claimant is a sandbox that asks for volumes.
type Claimant struct {
	Sandbox      runtimehandler.Sandbox
	Handler      string // the handler that reaches it
	Processes    []process.Identity
	Capabilities runtimehandler.Capabilities
	FSTypes      []string
}

// Claim is one mount source that is a deferral.
type Claim struct {
	Index    int // in the list of sources
	Deferral runtimehandler.Deferral
	SubPath  string // relative to the volume's root; empty for all of it
}

// Claim finds the deferrals among mount sources and binds them to a sandbox, all or none. A sandbox may claim again
// what it has. ErrFailedPrecondition if another sandbox may still use one of them, or if this sandbox cannot do what
// one of them needs.
func (m *Manager) Claim(ctx context.Context, by Claimant, sources []string) ([]Claim, error) {
	claims, targets, err := m.find(sources)
	if err != nil || len(claims) == 0 {
		return nil, err
	}
	unlock, err := m.locks.Lock(ctx, targets...)
	if err != nil {
		return nil, err
	}
	defer unlock()

	var changed []journal.Record
	for i, claim := range claims {
		rec, ok := m.journal.Get(claim.Deferral.TargetPath)
		if !ok || rec.Host {
			return nil, fmt.Errorf("%s was unpublished meanwhile: %w", claim.Deferral.TargetPath, errdefs.ErrAborted)
		}
		if err := claimable(rec, by, claim.SubPath); err != nil {
			m.notify(Notice{Pod: rec.Pod, Warning: true, Reason: "SandboxVolumeRefused", Message: err.Error()})
			return nil, err
		}
		claims[i].Deferral = rec.Deferral
		claims[i].Deferral.Blankness = blankness(rec)
		if !boundTo(rec, by) {
			rec.Claimed = true
			rec.Binding = &journal.Binding{Sandbox: by.Sandbox, Processes: by.Processes, Since: time.Now().UTC()}
			changed = append(changed, rec)
		}
	}
	if len(changed) > 0 {
		if err := m.journal.Put(nil, changed...); err != nil {
			return nil, err
		}
		crashpoint.At(ctx, "claim: committed")
	}
	return claims, nil
}

// find looks for deferrals among mount sources. It returns claims that have no more of their deferrals than the target
// path, and those paths for locking.
func (m *Manager) find(sources []string) (claims []Claim, targets []string, err error) {
	byPath := map[string]string{}
	for _, rec := range m.List() {
		byPath[rec.Deferral.TargetPath] = rec.Deferral.TargetPath
		byPath[rec.ResolvedTarget] = rec.Deferral.TargetPath
	}
	delete(byPath, "")
	for i, source := range sources {
		source = filepath.Clean(source)
		target, sub, ok := byParents(byPath, source)
		if !ok {
			if target, sub, ok, err = bySeal(byPath, source); err != nil {
				return nil, nil, err
			}
		}
		if ok {
			claims = append(claims, Claim{Index: i, SubPath: sub, Deferral: runtimehandler.Deferral{TargetPath: target}})
			targets = append(targets, target)
		}
	}
	return claims, targets, nil
}

// byParents finds the target path that a source is, or lies beneath (KEP-2857, for subPath).
func byParents(byPath map[string]string, source string) (target, sub string, ok bool) {
	if !filepath.IsAbs(source) {
		return "", "", false
	}
	for dir := source; ; dir = filepath.Dir(dir) {
		if target, ok := byPath[dir]; ok {
			return target, strings.TrimPrefix(strings.TrimPrefix(source, dir), "/"), true
		}
		if dir == "/" {
			return "", "", false
		}
	}
}

// bySeal finds the target path out of whose seal a source is: for a subPath the kubelet hands over a bind mount that it
// has made elsewhere.
func bySeal(byPath map[string]string, source string) (target, sub string, ok bool, err error) {
	if !filepath.IsAbs(source) {
		return "", "", false, nil
	}
	id, sub, ok, err := seal.Locate(source)
	if err != nil || !ok {
		return "", "", false, err
	}
	for _, target := range byPath {
		if have, ok, err := seal.Of(target); err == nil && ok && have == id {
			return target, sub, true, nil
		}
	}
	return "", "", false, fmt.Errorf("%s is out of the seal of a volume that is no longer published: %w", source, errdefs.ErrFailedPrecondition)
}

// boundTo says whether a sandbox, in this very incarnation, has a volume.
func boundTo(rec journal.Record, by Claimant) bool {
	return rec.Binding != nil && rec.Binding.Sandbox == by.Sandbox && slices.Equal(rec.Binding.Processes, by.Processes)
}

// claimable says whether a sandbox may have a volume.
func claimable(rec journal.Record, by Claimant, subPath string) error {
	d := rec.Deferral
	if rec.State != journal.Published {
		return fmt.Errorf("volume %s is %s at %s, not published: %w", d.VolumeID, rec.State, d.TargetPath, errdefs.ErrFailedPrecondition)
	}
	if rec.Handler != by.Handler {
		return fmt.Errorf("volume %s is published for runtime handler %s, and sandbox %s (%s) is one of handler %s: %w",
			d.VolumeID, rec.Handler, by.Sandbox.ID, by.Sandbox.Runtime, by.Handler, errdefs.ErrFailedPrecondition)
	}
	if rec.Binding != nil && !boundTo(rec, by) {
		if err := released(rec); err != nil {
			return err
		}
	}
	lacks := func(what string) error {
		return fmt.Errorf("volume %s needs %s, which sandbox %s (%s) cannot do: %w", d.VolumeID, what, by.Sandbox.ID, by.Sandbox.Runtime, errdefs.ErrFailedPrecondition)
	}
	switch {
	case !slices.Contains(by.FSTypes, d.FSType):
		return fmt.Errorf("volume %s has filesystem %s; sandbox %s (%s) knows %v: %w", d.VolumeID, d.FSType, by.Sandbox.ID, by.Sandbox.Runtime, by.FSTypes, errdefs.ErrFailedPrecondition)
	case d.Format && blankness(rec) != runtimehandler.BlanknessUnknown && !by.Capabilities.Format:
		return lacks("a filesystem to be made")
	case d.Group != nil && !d.ReadOnly && !by.Capabilities.Group:
		return lacks("its files to be given to a group (fsGroup)")
	case subPath != "" && !by.Capabilities.SubPath:
		return lacks("a sub-directory to be mounted (subPath)")
	}
	return nil
}

// blankness is what is known about a device's content when a sandbox claims it; see docs/adr/0001-blankness.md.
func blankness(rec journal.Record) runtimehandler.Blankness {
	switch {
	case rec.Mounted || rec.Deferral.Blankness != runtimehandler.BlanknessNeverWritten:
		return runtimehandler.BlanknessUnknown
	case rec.Claimed:
		return runtimehandler.BlanknessUnfinishedFormat
	default:
		return runtimehandler.BlanknessNeverWritten
	}
}
