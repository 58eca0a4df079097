// Package admin serves the operator's command on the node (service Admin of crust.admin.v1).
package admin

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/process"
	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/crust/internal/status"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/runtimehandler"
)

// statsTimeout is how long a description waits for a sandbox.
const statsTimeout = 5 * time.Second

// Config is what the service tells of.
type Config struct {
	Deferrals *deferrals.Manager
	Checks    status.Checks
	// Describe returns what the daemon is configured for: all of the answer but checks, handlers and the start.
	Describe func(ctx context.Context) *adminv1.GetStatusResponse
	// Handlers are the runtime handlers; RuntimeClasses returns to which of them the handlers of RuntimeClasses belong now.
	Handlers       []runtimehandler.Handler
	RuntimeClasses func() map[string]string
}

// Service is the Admin service.
type Service struct {
	adminv1.UnsafeAdminServer
	config  Config
	started time.Time
}

var _ adminv1.AdminServer = (*Service)(nil)

// New returns the service.
func New(c Config) *Service { return &Service{config: c, started: time.Now()} }

// GetStatus is that of the API.
func (s *Service) GetStatus(ctx context.Context, _ *adminv1.GetStatusRequest) (*adminv1.GetStatusResponse, error) {
	resp := s.config.Describe(ctx)
	resp.Started = timestamppb.New(s.started)
	for _, r := range s.config.Checks.Run(ctx) {
		check := &adminv1.Check{Name: r.Name, Ok: r.Err == nil}
		if r.Err != nil {
			check.Message = r.Err.Error()
		}
		resp.Checks = append(resp.Checks, check)
	}
	for _, h := range s.config.Handlers {
		resp.Handlers = append(resp.Handlers, s.describeHandler(h))
	}
	return resp, nil
}

func (s *Service) describeHandler(h runtimehandler.Handler) *adminv1.Handler {
	d := &adminv1.Handler{Name: h.Name(), Roots: h.Roots()}
	for class, name := range s.config.RuntimeClasses() {
		if name == h.Name() {
			d.RuntimeClasses = append(d.RuntimeClasses, class)
		}
	}
	slices.Sort(d.RuntimeClasses)
	c := h.Capabilities()
	for _, ability := range []struct {
		name string
		has  bool
	}{
		{"format", c.Format},
		{"check", c.Check},
		{"grow", c.Grow},
		{"online-expand", c.OnlineExpand},
		{"group", c.Group},
		{"subpath", c.SubPath},
		{"freeze", c.Freeze},
	} {
		if ability.has {
			d.Capabilities = append(d.Capabilities, ability.name)
		}
	}
	return d
}

// ListDeferrals is that of the API.
func (s *Service) ListDeferrals(context.Context, *adminv1.ListDeferralsRequest) (*adminv1.ListDeferralsResponse, error) {
	resp := &adminv1.ListDeferralsResponse{}
	for _, rec := range s.config.Deferrals.List() {
		resp.Deferrals = append(resp.Deferrals, toProto(rec))
	}
	return resp, nil
}

// find returns the deferral that a name fits.
func (s *Service) find(name string) (journal.Record, error) {
	if name == "" {
		return journal.Record{}, fmt.Errorf("name is missing: %w", errdefs.ErrInvalidArgument)
	}
	var found []journal.Record
	for _, rec := range s.config.Deferrals.List() {
		p := rec.Pod
		if slices.Contains([]string{rec.Deferral.TargetPath, rec.ResolvedTarget, rec.Deferral.VolumeID, p.UID, p.Namespace + "/" + p.Name}, name) {
			found = append(found, rec)
		}
	}
	switch len(found) {
	case 0:
		return journal.Record{}, fmt.Errorf("no deferral is called %s; see crustctl list: %w", name, errdefs.ErrNotFound)
	case 1:
		return found[0], nil
	}
	return journal.Record{}, fmt.Errorf("%d deferrals are called %s; use the target path of one: %w", len(found), name, errdefs.ErrFailedPrecondition)
}

// GetDeferral is that of the API.
func (s *Service) GetDeferral(ctx context.Context, req *adminv1.GetDeferralRequest) (*adminv1.GetDeferralResponse, error) {
	rec, err := s.find(req.GetName())
	if err != nil {
		return nil, err
	}
	resp := &adminv1.GetDeferralResponse{Deferral: toProto(rec)}
	statsCtx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	if stats, err := s.config.Deferrals.Stats(statsCtx, rec.Deferral.TargetPath); err != nil {
		resp.StatsError = err.Error()
	} else {
		resp.Stats = measured(stats)
	}
	if resp.Sealed, err = seal.Intact(rec.Deferral.TargetPath); err != nil {
		return nil, err
	}
	holders, err := process.Holders(rec.Deferral.Device)
	if err != nil {
		return nil, err
	}
	for _, h := range holders {
		resp.Holders = append(resp.Holders, h.String())
	}
	for _, f := range s.config.Deferrals.Inspect(ctx) {
		if f.Path == rec.Deferral.TargetPath {
			resp.Findings = append(resp.Findings, finding(f))
		}
	}
	return resp, nil
}

// ExpandDeferral is that of the API.
func (s *Service) ExpandDeferral(ctx context.Context, req *adminv1.ExpandDeferralRequest) (*adminv1.ExpandDeferralResponse, error) {
	rec, err := s.find(req.GetName())
	if err != nil {
		return nil, err
	}
	resp := &adminv1.ExpandDeferralResponse{}
	if resp.DeviceBytes, err = deferrals.DeviceSize(rec.Deferral.Device); err != nil {
		return nil, err
	}
	if stats, err := s.config.Deferrals.Stats(ctx, rec.Deferral.TargetPath); err == nil {
		resp.FilesystemBytes = stats.Bytes.Total
	}
	resp.Plan = "no sandbox has it: its filesystem is grown to its device when the next one mounts it"
	if rec.Binding != nil {
		resp.Plan = fmt.Sprintf("sandbox %s is told the device's size and grows the filesystem to it", rec.Binding.Sandbox.ID)
	}
	if req.GetDryRun() {
		return resp, nil
	}
	_, err = s.config.Deferrals.ExpandToDevice(ctx, rec.Deferral.TargetPath, 0, 0)
	return resp, err
}

// Reconcile is that of the API.
func (s *Service) Reconcile(ctx context.Context, req *adminv1.ReconcileRequest) (*adminv1.ReconcileResponse, error) {
	look := s.config.Deferrals.Reconcile
	if req.GetDryRun() {
		look = s.config.Deferrals.Inspect
	}
	resp := &adminv1.ReconcileResponse{}
	for _, f := range look(ctx) {
		resp.Findings = append(resp.Findings, finding(f))
	}
	return resp, nil
}

func finding(f deferrals.Finding) *adminv1.Finding {
	return &adminv1.Finding{Kind: string(f.Kind), Path: f.Path, VolumeId: f.VolumeID, Text: f.Text}
}

func pod(p journal.Pod) *adminv1.Pod {
	return &adminv1.Pod{Uid: p.UID, Namespace: p.Namespace, Name: p.Name}
}

// toProto is the wire form of a record.
func toProto(rec journal.Record) *adminv1.Deferral {
	d := &adminv1.Deferral{
		TargetPath:     rec.Deferral.TargetPath,
		Driver:         rec.Deferral.Driver,
		VolumeId:       rec.Deferral.VolumeID,
		Phase:          rec.Phase(),
		Handler:        rec.Handler,
		Device:         rec.Deferral.Device,
		SizeBytes:      rec.Deferral.SizeBytes,
		FsType:         rec.Deferral.FSType,
		MountFlags:     rec.Deferral.MountFlags,
		ReadOnly:       rec.Deferral.ReadOnly,
		Created:        timestamppb.New(rec.Created),
		Pod:            pod(rec.Pod),
		ExpandingBytes: rec.Expanding,
	}
	if rec.Deferral.Group != nil {
		d.SupplementalGroup = strconv.FormatUint(uint64(*rec.Deferral.Group), 10)
	}
	if b := rec.Binding; b != nil {
		d.Sandbox = &adminv1.Sandbox{Id: b.Sandbox.ID, Runtime: b.Sandbox.Runtime, Address: b.Sandbox.Address, Since: timestamppb.New(b.Since), Breach: b.Breach}
		for _, p := range b.Processes {
			d.Sandbox.Pids = append(d.Sandbox.Pids, int64(p.PID))
			d.Sandbox.BootId = p.Boot
		}
	}
	return d
}
