package main

import (
	"context"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

func expandCommand(o *options) *cobra.Command {
	req := &adminv1.ExpandDeferralRequest{}
	cmd := &cobra.Command{
		Use:   "expand NAME",
		Short: "Grow a filesystem in its sandbox to what its device has by now",
		Long: `expand does the second half of an expansion: the device has grown, and the filesystem in the sandbox has to follow. The
first half, growing the device, is for the driver's controller; enlarge the PersistentVolumeClaim, which does both. Nothing
ever shrinks.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Name = args[0]
			return o.admin(cmd, func(ctx context.Context, c adminv1.AdminClient) error {
				resp, err := c.ExpandDeferral(ctx, req)
				if err != nil {
					return err
				}
				return o.format.Print(cmd.OutOrStdout(), resp, expandView(resp, req.GetDryRun()))
			})
		},
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only say what would be done")
	return cmd
}

func expandView(resp *adminv1.ExpandDeferralResponse, dryRun bool) output.View {
	before, plan := "not known", "Done"
	if resp.GetFilesystemBytes() > 0 {
		before = output.Bytes(resp.GetFilesystemBytes())
	}
	if dryRun {
		plan = "Would be done"
	}
	return output.Fields(
		output.Field{Name: "Device", Value: output.Bytes(resp.GetDeviceBytes())},
		output.Field{Name: "Filesystem before", Value: before},
		output.Field{Name: plan, Value: resp.GetPlan()},
	)
}
