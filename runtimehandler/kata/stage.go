package kata

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/assist"
)

// Stage does on the host what is needed and allowed, and puts the record out. Until it is out a sandbox does not find the
// volume, and the sealed target path keeps it from writing elsewhere; a record that is out already is withdrawn while the
// host works on the device, and put out again whatever comes of that.
func (h *Handler) Stage(ctx context.Context, d runtimehandler.Deferral) error {
	name, raw, err := h.encode(d, "")
	if err != nil {
		return err
	}
	who, old, err := h.look(name)
	if err != nil {
		return fmt.Errorf("volume %s: record: %w", d.VolumeID, err)
	}
	if who == stranger {
		return fmt.Errorf("volume %s: %w", d.VolumeID, h.taken(name)) // before anything is done on the device
	}
	again := who == ours && h.same(old, raw)
	work, err := h.needed(d, again)
	if err != nil {
		return err
	}
	done := ""
	if again {
		done = assistedBefore(old)
	}
	if len(work.Steps) > 0 {
		if err := h.assist(ctx, d, name, work); err != nil {
			if again {
				err = errors.Join(err, h.stage(name, old))
			}
			return err
		}
		done = note(done, work.Steps)
	}
	if _, raw, err = h.encode(d, done); err != nil {
		return err
	}
	if err := h.stage(name, raw); err != nil {
		return fmt.Errorf("volume %s: record: %w", d.VolumeID, err)
	}
	crashpoint.At(ctx, "kata: record is out")
	return nil
}

// stage puts a record out and remembers that.
func (h *Handler) stage(name string, raw []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	before, known := h.own[name]
	h.own[name] = true
	err := h.put(name, raw)
	if err != nil {
		h.own[name] = before
		if !known {
			delete(h.own, name)
		}
	}
	return err
}

// take withdraws a record after a failure, if it is ours.
func (h *Handler) take(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	who, _, err := h.look(name)
	if err != nil || who != ours {
		return err
	}
	h.own[name] = false
	return h.withdraw(name)
}

// same says whether a record is that of the same deferral, whatever was done on the host for it.
func (h *Handler) same(a, b []byte) bool {
	var infoA, infoB mountInfo
	if json.Unmarshal(a, &infoA) != nil || json.Unmarshal(b, &infoB) != nil {
		return false
	}
	delete(infoA.Metadata, assistKey)
	delete(infoB.Metadata, assistKey)
	return reflect.DeepEqual(infoA, infoB)
}

// assistedBefore returns what an earlier Stage has noted in the record that it put out.
func assistedBefore(raw []byte) string {
	var info mountInfo
	if json.Unmarshal(raw, &info) != nil {
		return ""
	}
	return info.Metadata[assistKey]
}

// note adds steps to a list of those that were done.
func note(done string, steps []assist.Step) string {
	list := strings.FieldsFunc(done, func(r rune) bool { return r == ',' })
	for _, s := range steps {
		if !slices.Contains(list, string(s)) {
			list = append(list, string(s))
		}
	}
	return strings.Join(list, ",")
}

// Unstage withdraws the record. What others have put at its name is left alone.
func (h *Handler) Unstage(ctx context.Context, targetPath string) error {
	name, err := nameFor(targetPath)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	who, _, err := h.look(name)
	if err != nil {
		return fmt.Errorf("record of %s: %w", targetPath, err)
	}
	h.own[name] = false
	if who != ours && who != broken {
		return nil
	}
	if err := h.withdraw(name); err != nil {
		return fmt.Errorf("record of %s: %w", targetPath, err)
	}
	crashpoint.At(ctx, "kata: record is withdrawn")
	return nil
}

// Sweep puts back records that were lost, as by a reboot, withdraws those of ours that a former process has left, and
// empties the scratch directory. It does nothing on devices: a sandbox may have them. Other drivers' records, and those
// that Kata makes for itself, are not even mentioned; what makes runtimes or drivers stumble is.
func (h *Handler) Sweep(_ context.Context, staged []runtimehandler.Deferral) ([]runtimehandler.Leftover, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	errs := []error{h.emptyScratch()}
	listed := map[string]bool{}
	for _, d := range staged {
		name, raw, err := h.encode(d, "")
		if err != nil {
			errs = append(errs, err)
			continue
		}
		listed[name] = true
		if out, known := h.own[name]; known && !out {
			continue // it was unstaged after the list was made
		}
		errs = append(errs, h.restore(name, raw))
	}
	for name, out := range h.own {
		if !out && !listed[name] {
			delete(h.own, name) // no later list can have it
		}
	}
	left, err := h.sweepRecords(listed)
	return left, errors.Join(append(errs, err)...)
}

// restore puts a record back if it is not there. One that is there may say what was done on the host, and stays.
func (h *Handler) restore(name string, raw []byte) error {
	who, _, err := h.look(name)
	if err != nil || who == ours {
		return err
	}
	return h.put(name, raw)
}

// emptyScratch removes what an interrupted process has left there. Nobody is at work in it while mu is held.
func (h *Handler) emptyScratch() error {
	entries, err := os.ReadDir(h.paths.scratch)
	if err != nil {
		return ignoreNotExist(err)
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(h.paths.scratch, e.Name())))
	}
	return errors.Join(errs...)
}

// sweepRecords withdraws records of ours that nobody wants, and reports what does harm.
func (h *Handler) sweepRecords(listed map[string]bool) ([]runtimehandler.Leftover, error) {
	entries, err := os.ReadDir(h.paths.records)
	if err != nil {
		return nil, ignoreNotExist(err)
	}
	var left []runtimehandler.Leftover
	var errs []error
	for _, e := range entries {
		name := e.Name()
		if listed[name] || h.own[name] {
			continue
		}
		report := func(text string) {
			left = append(left, runtimehandler.Leftover{Path: filepath.Join(h.paths.records, name), Text: text, Stranger: true})
		}
		source, err := base64.URLEncoding.DecodeString(name)
		if err != nil {
			report("is no record of Kata's (its name is not base64url), and drivers that read all records fail over it; remove it")
			continue
		}
		who, _, err := h.look(name)
		switch {
		case err != nil:
			errs = append(errs, err)
		case who == ours:
			errs = append(errs, h.withdraw(name))
		case who == broken:
			report(fmt.Sprintf("is a record without %s, for %s: runtime-rs starts no container with that volume; remove it", infoName, source))
		}
	}
	return left, errors.Join(errs...)
}

// needed finds out which steps on the host a deferral needs before a sandbox can mount it. again says that it was handed
// over before. ErrFailedPrecondition if one of them is not allowed.
func (h *Handler) needed(d runtimehandler.Deferral, again bool) (assist.Work, error) {
	work := assist.Work{
		Device: d.Device, FSType: d.FSType, SizeBytes: d.SizeBytes, MountFlags: d.MountFlags,
		NeverWritten: d.Blankness == runtimehandler.BlanknessNeverWritten, Unfinished: d.Blankness == runtimehandler.BlanknessUnfinishedFormat,
	}
	if d.ReadOnly {
		return work, nil
	}
	found, err := assist.Look(d.Device)
	if err != nil {
		return work, fmt.Errorf("volume %s: %w", d.VolumeID, err)
	}
	blank := d.Format && d.Blankness != runtimehandler.BlanknessUnknown && !again && found.FSType != d.FSType
	need := func(step assist.Step, why string) error {
		if !h.may(step) {
			return fmt.Errorf("volume %s: %s, which Kata's agent does not do, and crustd may not: add %q to hostAssist of handler %s in crustd's configuration: %w",
				d.VolumeID, why, step, h.config.Name, errdefs.ErrFailedPrecondition)
		}
		work.Steps = append(work.Steps, step)
		return nil
	}
	if blank {
		err = errors.Join(err, need(assist.Format, "it is blank and needs a filesystem"))
	}
	if !blank && found.Errors {
		err = errors.Join(err, need(assist.Check, "its filesystem has recorded errors and needs a check (e2fsck)"))
	} else if !blank && !again && h.may(assist.Check) {
		work.Steps = append(work.Steps, assist.Check)
	}
	if !blank && found.Smaller(d.SizeBytes) {
		err = errors.Join(err, need(assist.Grow, fmt.Sprintf("its filesystem of %d bytes has to grow to its device's %d", found.Bytes, d.SizeBytes)))
	}
	if d.Group != nil && !h.groupInGuest(d) && !again {
		work.Group, work.OnRootMismatch = d.Group, d.GroupChangePolicy == runtimehandler.GroupChangeOnRootMismatch
		err = errors.Join(err, need(assist.Chown, fmt.Sprintf("its files have to be given to group %d (fsGroup)", *d.Group)))
	}
	return work, err
}

// assist has a child process work on a device that no sandbox has, and of which none can find the record meanwhile.
func (h *Handler) assist(ctx context.Context, d runtimehandler.Deferral, name string, work assist.Work) error {
	if err := h.unused(ctx, d); err != nil {
		return err
	}
	if err := h.take(name); err != nil {
		return fmt.Errorf("volume %s: record: %w", d.VolumeID, err)
	}
	// A sandbox that had read the record before is seen now.
	if err := h.unused(ctx, d); err != nil {
		return err
	}
	crashpoint.At(ctx, "kata: about to assist")
	ctx, cancel := context.WithTimeout(ctx, h.config.AssistTimeout)
	defer cancel()
	if err := assist.Run(ctx, h.config.Assistant, work); err != nil {
		return fmt.Errorf("volume %s: on the host: %w", d.VolumeID, err)
	}
	crashpoint.At(ctx, "kata: assisted")
	return nil
}

// unused is ErrFailedPrecondition if a sandbox may use a volume, as far as Kata's traces tell.
func (h *Handler) unused(ctx context.Context, d runtimehandler.Deferral) error {
	found, err := h.locate(ctx, d.TargetPath)
	if err != nil {
		return fmt.Errorf("volume %s: it cannot be told whether a sandbox has it: %w", d.VolumeID, err)
	}
	for _, c := range found {
		if !c.marked.IsZero() || len(c.uses) > 0 {
			return fmt.Errorf("volume %s: sandbox %s may be using it, and the host works on no volume in use: stop the pod first: %w", d.VolumeID, c.sandbox.ID, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}
