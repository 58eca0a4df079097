package runtimeapi

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/deferrals"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
)

const (
	// maxFreeze is how long a filesystem may be frozen at a time.
	maxFreeze = 60 * time.Second
	// maxVolumes is how many volumes a call may name.
	maxVolumes = 256
)

// Consistency is the service by which drivers have filesystems frozen while they cut snapshots.
type Consistency struct {
	runtimev1.UnsafeConsistencyServer
	deferrals *deferrals.Manager
}

var _ runtimev1.ConsistencyServer = (*Consistency)(nil)

// NewConsistency returns the service.
func NewConsistency(manager *deferrals.Manager) *Consistency { return &Consistency{deferrals: manager} }

// FreezeVolumes is that of the API.
func (c *Consistency) FreezeVolumes(ctx context.Context, req *runtimev1.FreezeVolumesRequest) (*runtimev1.FreezeVolumesResponse, error) {
	if err := validVolumes(req.GetDriver(), req.GetVolumeIds()); err != nil {
		return nil, err
	}
	limit := req.GetTimeLimit().AsDuration()
	if !req.GetTimeLimit().IsValid() || limit <= 0 || limit > maxFreeze {
		return nil, fmt.Errorf("time_limit %v: want more than zero and at most %v: %w", limit, maxFreeze, errdefs.ErrInvalidArgument)
	}
	frozen, notMounted, err := c.deferrals.Freeze(ctx, req.GetDriver(), req.GetVolumeIds(), limit)
	if err != nil {
		return nil, err
	}
	return &runtimev1.FreezeVolumesResponse{Frozen: frozen, NotMounted: notMounted}, nil
}

// ThawVolumes is that of the API.
func (c *Consistency) ThawVolumes(ctx context.Context, req *runtimev1.ThawVolumesRequest) (*runtimev1.ThawVolumesResponse, error) {
	if err := validVolumes(req.GetDriver(), req.GetVolumeIds()); err != nil {
		return nil, err
	}
	if err := c.deferrals.Thaw(ctx, req.GetDriver(), req.GetVolumeIds()); err != nil {
		return nil, err
	}
	return &runtimev1.ThawVolumesResponse{}, nil
}

func validVolumes(driver string, ids []string) error {
	if driver == "" {
		return fmt.Errorf("driver is missing: %w", errdefs.ErrInvalidArgument)
	}
	if len(ids) == 0 || len(ids) > maxVolumes {
		return fmt.Errorf("%d volume_ids, want 1 to %d: %w", len(ids), maxVolumes, errdefs.ErrInvalidArgument)
	}
	sorted := slices.Sorted(slices.Values(ids))
	if sorted[0] == "" || len(slices.Compact(sorted)) != len(ids) {
		return fmt.Errorf("volume_ids has an empty one, or one twice: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}
