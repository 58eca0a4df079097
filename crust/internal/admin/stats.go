package admin

import (
	"context"

	"golang.org/x/sync/errgroup"

	"crust.dev/crust/crust/internal/journal"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/runtimehandler"
)

// atOnce is how many sandboxes are asked at the same time. Those that hang only wait.
const atOnce = 32

// ListStats is that of the API.
func (s *Service) ListStats(ctx context.Context, req *adminv1.ListStatsRequest) (*adminv1.ListStatsResponse, error) {
	records := s.config.Deferrals.List()
	if len(req.GetNames()) > 0 {
		records = nil
		for _, name := range req.GetNames() {
			rec, err := s.find(name)
			if err != nil {
				return nil, err
			}
			records = append(records, rec)
		}
	}
	resp := &adminv1.ListStatsResponse{Stats: make([]*adminv1.DeferralStats, len(records))}
	var group errgroup.Group
	group.SetLimit(atOnce)
	for i, rec := range records {
		group.Go(func() error {
			resp.Stats[i] = s.statsOf(ctx, rec)
			return nil
		})
	}
	return resp, group.Wait()
}

func (s *Service) statsOf(ctx context.Context, rec journal.Record) *adminv1.DeferralStats {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	one := &adminv1.DeferralStats{TargetPath: rec.Deferral.TargetPath, VolumeId: rec.Deferral.VolumeID, Pod: pod(rec.Pod), Phase: rec.Phase()}
	if stats, err := s.config.Deferrals.Stats(ctx, rec.Deferral.TargetPath); err != nil {
		one.Error = err.Error()
	} else {
		one.Stats = measured(stats)
		one.Phase = "mounted" // by a sandbox that may have been found just now
	}
	return one
}

func measured(stats runtimehandler.Stats) *adminv1.Stats {
	return &adminv1.Stats{Bytes: usage(stats.Bytes), Inodes: usage(stats.Inodes), Abnormal: stats.Abnormal, Message: stats.Message}
}

func usage(u runtimehandler.Usage) *adminv1.Usage {
	return &adminv1.Usage{Total: u.Total, Used: u.Used, Available: u.Available}
}
