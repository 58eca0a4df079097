package main

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

func statsCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "stats [NAME...]",
		Short: "Measure filesystems from inside their sandboxes; all if none is named",
		Long: `stats asks the sandboxes. One that does not answer costs its own line and a few seconds, and nothing else: its line says
why, and the exit code is 1. A volume that no sandbox has mounted yet has no statistics, which is an error only if it was
named.`,
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.admin(cmd, func(ctx context.Context, c adminv1.AdminClient) error {
				resp, err := c.ListStats(ctx, &adminv1.ListStatsRequest{Names: args})
				if err != nil {
					return err
				}
				if err := o.format.Print(cmd.OutOrStdout(), resp, statsView(resp)); err != nil {
					return err
				}
				for _, s := range resp.GetStats() {
					if s.GetError() != "" && (len(args) > 0 || s.GetPhase() == "mounted" || s.GetPhase() == "breached") {
						return &command.ExitError{Code: 1}
					}
				}
				return nil
			})
		},
	}
}

func statsView(resp *adminv1.ListStatsResponse) output.View {
	type stats = adminv1.DeferralStats
	// number is a column of measured numbers.
	number := func(header string, wide bool, text func(int64) string, get func(*adminv1.Stats) int64) output.Column[*stats] {
		return output.Column[*stats]{Header: header, Wide: wide, Cell: func(s *stats) string {
			if s.GetStats() == nil {
				return ""
			}
			return text(get(s.GetStats()))
		}}
	}
	count := func(n int64) string { return strconv.FormatInt(n, 10) }
	return output.List(resp.GetStats(), "No volume is deferred on this node.",
		output.Column[*stats]{Header: "POD", Cell: func(s *stats) string { return podName(s.GetPod()) }},
		output.Column[*stats]{Header: "VOLUME", Cell: (*stats).GetVolumeId},
		number("SIZE", false, output.Bytes, func(s *adminv1.Stats) int64 { return s.GetBytes().GetTotal() }),
		number("USED", false, output.Bytes, func(s *adminv1.Stats) int64 { return s.GetBytes().GetUsed() }),
		number("FREE", false, output.Bytes, func(s *adminv1.Stats) int64 { return s.GetBytes().GetAvailable() }),
		number("INODES", true, count, func(s *adminv1.Stats) int64 { return s.GetInodes().GetTotal() }),
		number("INODES USED", true, count, func(s *adminv1.Stats) int64 { return s.GetInodes().GetUsed() }),
		output.Column[*stats]{Header: "HEALTH", Cell: health},
		output.Column[*stats]{Header: "TARGET", Cell: (*stats).GetTargetPath, Wide: true},
	)
}

func health(s *adminv1.DeferralStats) string {
	switch {
	case s.GetError() != "":
		return s.GetError()
	case s.GetStats().GetAbnormal():
		return s.GetStats().GetMessage()
	}
	return "good"
}
