package shim

import (
	"context"
	"errors"
	"fmt"
	"path"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// guestRoot is where volumes are mounted in the guest; containers see them through bind mounts.
const guestRoot = "/run/crust/volumes"

const (
	// mountTimeout bounds everything from attaching to a mounted filesystem; a check of a large damaged filesystem is
	// what takes long.
	mountTimeout = 10 * time.Minute
	// guestTimeout bounds a call to the agent that only waits for the kernel.
	guestTimeout = 30 * time.Second
	// undoTimeout bounds the clean-up after a failure.
	undoTimeout = 30 * time.Second
)

// Disk is a device to attach to a sandbox.
type Disk struct {
	Serial   string // under which the guest finds it
	Path     string // block device or image file on the host
	ReadOnly bool
}

// VM is what a shim must be able to do with its virtual machine.
type VM interface {
	// AttachDisk makes a disk appear in the guest. The same disk again succeeds.
	AttachDisk(ctx context.Context, disk Disk) error
	// DetachDisk removes it, and returns only when the host's device is closed. A disk that is not there succeeds.
	DetachDisk(ctx context.Context, serial string) error
	// ResizeDisk makes the guest see the present size of the host's device, and returns that size in bytes. It never
	// makes anything smaller.
	ResizeDisk(ctx context.Context, serial string) (int64, error)
}

// Volumes are the deferrals of one sandbox whose guest runs crust-agent. A volume that hangs holds up nobody but those
// who ask for it.
type Volumes struct {
	client *Client
	vm     VM
	agent  guestv1.TTRPCAgentService

	mu      sync.Mutex
	volumes map[string]*volume // by target path; one that was released stays, for its lock
}

// volume is one deferral in the sandbox.
type volume struct {
	target string // constant

	mu       sync.Mutex
	deferral runtimehandler.Deferral
	claimed  bool // the daemon counts it as ours, and its device may be attached
	mounted  bool // reported as bound
}

// NewVolumes returns the volumes of a sandbox that has registered.
func NewVolumes(client *Client, vm VM, agent guestv1.TTRPCAgentService) *Volumes {
	return &Volumes{client: client, vm: vm, agent: agent, volumes: map[string]*volume{}}
}

// guestPath is where a volume is mounted in the guest.
func guestPath(d runtimehandler.Deferral) string { return path.Join(guestRoot, d.Serial) }

// Mount makes those of a container's mounts that are deferrals appear at their destinations in the guest. It returns
// which of the mounts these were, by their index; the others are the caller's to deal with. If it fails, what it had
// begun is undone as far as the guest answers. It may be called again with the same mounts.
func (v *Volumes) Mount(ctx context.Context, mounts []Mount) (deferrals map[int]runtimehandler.Deferral, err error) {
	resolved, err := v.client.Resolve(ctx, mounts)
	if err != nil {
		return nil, err
	}
	deferrals = map[int]runtimehandler.Deferral{}
	for _, r := range resolved {
		if err := v.ensure(ctx, r.Deferral); err != nil {
			return nil, err
		}
		if err := v.bindPath(ctx, r, mounts[r.Index]); err != nil {
			return nil, err
		}
		deferrals[r.Index] = r.Deferral
	}
	return deferrals, nil
}

// ensure mounts a volume in the guest unless it is mounted already.
func (v *Volumes) ensure(ctx context.Context, d runtimehandler.Deferral) error {
	vol := v.volume(d)
	vol.mu.Lock()
	defer vol.mu.Unlock()
	if vol.mounted {
		return nil
	}
	vol.deferral, vol.claimed = d, true
	start := time.Now()
	mountCtx, cancel := context.WithTimeout(ctx, mountTimeout)
	defer cancel()
	report, err := v.attachAndMount(mountCtx, d)
	if err == nil {
		report.Duration = durationpb.New(time.Since(start))
		err = v.client.Bound(mountCtx, d.TargetPath, report)
	}
	if err != nil {
		err = fmt.Errorf("volume %s: %w", d.VolumeID, err)
		if undo := v.release(ctx, vol); undo != nil {
			return errors.Join(err, fmt.Errorf("undo: %w", undo))
		}
		return err
	}
	vol.mounted = true
	return nil
}

func (v *Volumes) volume(d runtimehandler.Deferral) *volume {
	v.mu.Lock()
	defer v.mu.Unlock()
	vol := v.volumes[d.TargetPath]
	if vol == nil {
		vol = &volume{target: d.TargetPath, deferral: d}
		v.volumes[d.TargetPath] = vol
	}
	return vol
}

func (v *Volumes) attachAndMount(ctx context.Context, d runtimehandler.Deferral) (*runtimev1.MountReport, error) {
	if err := verifyBlank(d); err != nil {
		return nil, err
	}
	if err := v.vm.AttachDisk(ctx, Disk{Serial: d.Serial, Path: d.Device, ReadOnly: d.ReadOnly}); err != nil {
		return nil, err
	}
	resp, err := v.agent.MountVolume(ctx, mountRequest(d))
	if err != nil {
		return nil, fmt.Errorf("mount in the guest: %w", rpc.FromWire(err))
	}
	return &runtimev1.MountReport{
		Formatted:    resp.GetFormatted(),
		Checked:      resp.GetChecked(),
		Repaired:     resp.GetRepaired(),
		Grown:        resp.GetGrown(),
		GroupApplied: resp.GetGroupApplied(),
		DeviceBytes:  resp.GetDeviceBytes(),
	}, nil
}

// verifyBlank holds the storage's word that a device was never written against the device, where that can be told.
func verifyBlank(d runtimehandler.Deferral) error {
	if !d.Format || d.Blankness != runtimehandler.BlanknessNeverWritten {
		return nil
	}
	blank, known, err := runtimehandler.NeverWritten(d.Device)
	if err != nil {
		return err
	}
	if known && !blank {
		return fmt.Errorf("%s is said to have been never written, and has data; it is not formatted: %w", d.Device, errdefs.ErrFailedPrecondition)
	}
	return nil
}

func mountRequest(d runtimehandler.Deferral) *guestv1.MountVolumeRequest {
	req := &guestv1.MountVolumeRequest{
		Serial:            d.Serial,
		MountPath:         guestPath(d),
		FsType:            d.FSType,
		MountFlags:        d.MountFlags,
		ReadOnly:          d.ReadOnly,
		Format:            guestv1.FormatPolicy_FORMAT_POLICY_NEVER,
		SupplementalGroup: d.Group,
		MinDeviceBytes:    d.SizeBytes,
	}
	if d.Format {
		switch d.Blankness {
		case runtimehandler.BlanknessNeverWritten:
			req.Format = guestv1.FormatPolicy_FORMAT_POLICY_NEVER_WRITTEN
		case runtimehandler.BlanknessUnfinishedFormat:
			req.Format = guestv1.FormatPolicy_FORMAT_POLICY_UNFINISHED_FORMAT
		}
	}
	if d.Group != nil && d.GroupChangePolicy == runtimehandler.GroupChangeOnRootMismatch {
		req.SupplementalGroupChangePolicy = guestv1.GroupChangePolicy_GROUP_CHANGE_POLICY_ON_ROOT_MISMATCH
	}
	return req
}

// bindPath shows a volume, or a directory of it, where the container expects it.
func (v *Volumes) bindPath(ctx context.Context, r Resolved, m Mount) error {
	ctx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	_, err := v.agent.BindPath(ctx, &guestv1.BindPathRequest{
		MountPath:   guestPath(r.Deferral),
		SubPath:     r.SubPath,
		Destination: m.Destination,
		ReadOnly:    r.Deferral.ReadOnly || readOnly(m.Options),
	})
	if err != nil {
		return fmt.Errorf("volume %s: show it at %s: %w", r.Deferral.VolumeID, m.Destination, rpc.FromWire(err))
	}
	return nil
}

// Unbind takes a volume away from a destination at which Mount has shown it. The volume stays mounted, for other
// containers. A destination at which nothing is shown succeeds.
func (v *Volumes) Unbind(ctx context.Context, d runtimehandler.Deferral, destination string) error {
	ctx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	if _, err := v.agent.UnbindPath(ctx, &guestv1.UnbindPathRequest{MountPath: guestPath(d), Destination: destination}); err != nil {
		return fmt.Errorf("volume %s: take it away from %s: %w", d.VolumeID, destination, rpc.FromWire(err))
	}
	return nil
}

// readOnly says whether mount options ask for a read-only mount; of contradictory ones the last wins, as in mount(8).
func readOnly(options []string) bool {
	ro := false
	for _, o := range options {
		switch o {
		case "ro":
			ro = true
		case "rw":
			ro = false
		}
	}
	return ro
}

// Release lets go of all volumes: unmounts them in the guest, detaches their devices, and says so. It goes on after an
// error with the next volume.
func (v *Volumes) Release(ctx context.Context) error {
	var errs []error
	for _, vol := range v.all() {
		vol.mu.Lock()
		if vol.claimed {
			errs = append(errs, v.release(ctx, vol))
		}
		vol.mu.Unlock()
	}
	return errors.Join(errs...)
}

// ReleaseDead says that all volumes are free because the virtual machine has ended and its process is gone. It waits for the
// daemon until ctx ends, which should be soon: a daemon that restarts meanwhile refuses to register a machine that has ended,
// and it takes the volumes back anyway when the shim's process ends, too.
func (v *Volumes) ReleaseDead(ctx context.Context) error {
	var errs []error
	for _, vol := range v.all() {
		vol.mu.Lock()
		if vol.claimed {
			errs = append(errs, v.forget(ctx, vol))
		}
		vol.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (v *Volumes) all() []*volume {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []*volume
	for _, vol := range v.volumes {
		all = append(all, vol)
	}
	return all
}

// release unmounts and detaches one volume; its lock is held. It does not listen to a caller that has given up.
func (v *Volumes) release(ctx context.Context, vol *volume) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if _, err := v.agent.UnmountVolume(ctx, &guestv1.UnmountVolumeRequest{MountPath: guestPath(vol.deferral)}); err != nil {
		return fmt.Errorf("volume %s: unmount in the guest: %w", vol.deferral.VolumeID, rpc.FromWire(err))
	}
	if err := v.vm.DetachDisk(ctx, vol.deferral.Serial); err != nil {
		return fmt.Errorf("volume %s: %w", vol.deferral.VolumeID, err)
	}
	return v.forget(ctx, vol)
}

func (v *Volumes) forget(ctx context.Context, vol *volume) error {
	if err := v.client.Released(ctx, vol.deferral.TargetPath); err != nil {
		return err
	}
	vol.claimed, vol.mounted = false, false
	return nil
}
