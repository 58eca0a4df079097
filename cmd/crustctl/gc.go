package main

import (
	"context"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

func gcCommand(o *options) *cobra.Command {
	req := &adminv1.ReconcileRequest{}
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Take back what pods, sandboxes and daemons that are gone have left",
		Long: `gc has crustd hold its records against the node now, as it does by itself once a minute and when something changes: what
was begun is finished or undone, volumes of sandboxes that have ended and of pods that are gone are taken back, seals are
renewed. A volume that something has open is never taken back. With --dry-run it says what it would do with its records;
what is stale on a runtime's side is only found by doing it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.admin(cmd, func(ctx context.Context, c adminv1.AdminClient) error {
				resp, err := c.Reconcile(ctx, req)
				if err != nil {
					return err
				}
				return o.format.Print(cmd.OutOrStdout(), resp, findings(resp.GetFindings()))
			})
		},
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only say what would be done")
	return cmd
}

func findings(list []*adminv1.Finding) output.View {
	return output.List(list, "Everything is in order.",
		output.Column[*adminv1.Finding]{Header: "KIND", Cell: (*adminv1.Finding).GetKind},
		output.Column[*adminv1.Finding]{Header: "VOLUME", Cell: (*adminv1.Finding).GetVolumeId},
		output.Column[*adminv1.Finding]{Header: "FINDING", Cell: (*adminv1.Finding).GetText},
		output.Column[*adminv1.Finding]{Header: "PATH", Cell: (*adminv1.Finding).GetPath},
	)
}
