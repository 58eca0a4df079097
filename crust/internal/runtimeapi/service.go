// Package runtimeapi serves the Runtime service of KEP-2857, for drivers that hand their volumes over themselves instead
// of returning them through the CSI extension. It is a facade of package deferrals: both ways end in the same record.
//
// One struct serves gRPC and ttrpc.
package runtimeapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/crust/internal/deferrals"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/runtimehandler"
)

// Driver stands in records for whoever uses this service, which does not say who it is.
const Driver = "runtime-api"

// Service is the Runtime service.
type Service struct {
	deferrals *deferrals.Manager
	handler   string
}

var (
	_ runtimev1.RuntimeServer       = server{}
	_ runtimev1.TTRPCRuntimeService = (*Service)(nil)
)

// New returns the service. handler is the name of the runtime handler for its volumes.
func New(manager *deferrals.Manager, handler string) *Service {
	return &Service{deferrals: manager, handler: handler}
}

// GRPC returns the service for a gRPC server.
func (s *Service) GRPC() runtimev1.RuntimeServer { return server{Service: s} }

// server adds what gRPC's generated interface demands.
type server struct {
	runtimev1.UnsafeRuntimeServer
	*Service
}

// RuntimeStageVolume is that of KEP-2857.
func (s *Service) RuntimeStageVolume(ctx context.Context, req *runtimev1.RuntimeStageVolumeRequest) (*runtimev1.RuntimeStageVolumeResponse, error) {
	d, err := parse(req)
	if err != nil {
		return nil, err
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("digest of the request: %w", err)
	}
	sum := sha256.Sum256(raw)
	err = s.deferrals.Publish(ctx, deferrals.Request{
		Driver:     Driver,
		VolumeID:   d.VolumeID,
		TargetPath: d.TargetPath,
		ReadOnly:   d.ReadOnly,
		Handler:    s.handler,
		Digest:     hex.EncodeToString(sum[:]),
	}, given{d})
	if err != nil {
		return nil, err
	}
	return &runtimev1.RuntimeStageVolumeResponse{}, nil
}

// Storage is the storage of a volume whose driver uses this service: it has published the volume before it called, and
// unpublishes it by itself.
func Storage(d runtimehandler.Deferral) deferrals.Storage { return given{d} }

type given struct{ runtimehandler.Deferral }

func (g given) Publish(context.Context) (runtimehandler.Deferral, error) { return g.Deferral, nil }
func (g given) Unpublish(context.Context, bool) error                    { return nil }

// parse checks a request. Nothing is known of the device's content, so it is never formatted.
func parse(req *runtimev1.RuntimeStageVolumeRequest) (runtimehandler.Deferral, error) {
	d := runtimehandler.Deferral{
		Driver:     Driver,
		VolumeID:   req.GetVolumeTargetPath(),
		TargetPath: req.GetVolumeTargetPath(),
		Device:     req.GetVolumeBackingPath(),
		Serial:     runtimehandler.Serial(Driver, req.GetVolumeTargetPath()),
		FSType:     req.GetFsType(),
		MountFlags: req.GetMountFlags(),
		ReadOnly:   readOnly(req.GetMountFlags()),
	}
	if err := validTarget(d.TargetPath); err != nil {
		return d, err
	}
	switch req.GetVolumeType() {
	case runtimev1.VolumeType_VOLUME_TYPE_BLOCK:
	case runtimev1.VolumeType_VOLUME_TYPE_NETWORK:
		return d, fmt.Errorf("%s: a network filesystem has no device to attach to a sandbox; mount it on the host: %w", d.TargetPath, errdefs.ErrNotImplemented)
	default:
		return d, fmt.Errorf("volume_type %v: want BLOCK: %w", req.GetVolumeType(), errdefs.ErrInvalidArgument)
	}
	if d.Device == "" || d.FSType == "" {
		return d, fmt.Errorf("volume_backing_path and fs_type are required: %w", errdefs.ErrInvalidArgument)
	}
	var err error
	if d.Group, err = runtimehandler.ParseGroup(req.GetVolumeSupplementalGroup()); err != nil {
		return d, err
	}
	switch policy := req.GetVolumeSupplementalGroupChangePolicy(); {
	case policy != runtimev1.GroupChangePolicy_GROUP_CHANGE_POLICY_UNSPECIFIED && d.Group == nil:
		return d, fmt.Errorf("volume_supplemental_group_change_policy without volume_supplemental_group: %w", errdefs.ErrInvalidArgument)
	case policy == runtimev1.GroupChangePolicy_GROUP_CHANGE_POLICY_ON_ROOT_MISMATCH:
		d.GroupChangePolicy = runtimehandler.GroupChangeOnRootMismatch
	}
	return d, nil
}

func readOnly(flags []string) bool {
	ro := false
	for _, f := range flags {
		switch f {
		case "ro":
			ro = true
		case "rw":
			ro = false
		}
	}
	return ro
}

func validTarget(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != strings.TrimSuffix(path, "/") {
		return fmt.Errorf("volume_target_path %q is not a clean absolute path: %w", path, errdefs.ErrInvalidArgument)
	}
	return nil
}

// RuntimeUnstageVolume is that of KEP-2857.
func (s *Service) RuntimeUnstageVolume(ctx context.Context, req *runtimev1.RuntimeUnstageVolumeRequest) (*runtimev1.RuntimeUnstageVolumeResponse, error) {
	if err := validTarget(req.GetVolumeTargetPath()); err != nil {
		return nil, err
	}
	if err := s.own(req.GetVolumeTargetPath()); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return nil, err
	}
	err := s.deferrals.Unpublish(ctx, req.GetVolumeTargetPath(), given{})
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return nil, err
	}
	return &runtimev1.RuntimeUnstageVolumeResponse{}, nil
}

// own refuses volumes that came by CSI: the kubelet unpublishes those.
func (s *Service) own(target string) error {
	for _, rec := range s.deferrals.List() {
		if rec.Deferral.TargetPath != target {
			continue
		}
		if rec.Deferral.Driver != Driver {
			return fmt.Errorf("%s was published by CSI driver %s; unpublish it there: %w", target, rec.Deferral.Driver, errdefs.ErrFailedPrecondition)
		}
		return nil
	}
	return fmt.Errorf("no volume is staged at %s: %w", target, errdefs.ErrNotFound)
}

// RuntimeGetVolumeStats is that of KEP-2857.
func (s *Service) RuntimeGetVolumeStats(ctx context.Context, req *runtimev1.RuntimeGetVolumeStatsRequest) (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	if err := validTarget(req.GetVolumeTargetPath()); err != nil {
		return nil, err
	}
	stats, err := s.deferrals.Stats(ctx, req.GetVolumeTargetPath())
	if err != nil {
		return nil, err
	}
	usage, condition := runtimehandler.StatsToProto(stats)
	return &runtimev1.RuntimeGetVolumeStatsResponse{Usage: usage, VolumeCondition: condition}, nil
}

// RuntimeExpandVolume is that of KEP-2857. The caller has grown the device.
func (s *Service) RuntimeExpandVolume(ctx context.Context, req *runtimev1.RuntimeExpandVolumeRequest) (*runtimev1.RuntimeExpandVolumeResponse, error) {
	if err := validTarget(req.GetVolumeTargetPath()); err != nil {
		return nil, err
	}
	required, limit := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	if required < 0 || limit < 0 {
		return nil, fmt.Errorf("capacity_range has a negative number (%d, %d): %w", required, limit, errdefs.ErrInvalidArgument)
	}
	size, err := s.deferrals.ExpandToDevice(ctx, req.GetVolumeTargetPath(), required, limit)
	if err != nil {
		return nil, err
	}
	return &runtimev1.RuntimeExpandVolumeResponse{CapacityBytes: size}, nil
}
