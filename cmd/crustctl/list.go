package main

import (
	"context"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

func listCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the volumes whose filesystems are mounted in sandboxes, whatever the runtime",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.admin(cmd, func(ctx context.Context, c adminv1.AdminClient) error {
				resp, err := c.ListDeferrals(ctx, &adminv1.ListDeferralsRequest{})
				if err != nil {
					return err
				}
				return o.format.Print(cmd.OutOrStdout(), resp, o.listView(resp))
			})
		},
	}
}

func (o *options) listView(resp *adminv1.ListDeferralsResponse) output.View {
	type column = output.Column[*adminv1.Deferral]
	return output.List(resp.GetDeferrals(), "No volume is deferred on this node.",
		column{Header: "POD", Cell: pod},
		column{Header: "VOLUME", Cell: (*adminv1.Deferral).GetVolumeId},
		column{Header: "HANDLER", Cell: (*adminv1.Deferral).GetHandler},
		column{Header: "PHASE", Cell: (*adminv1.Deferral).GetPhase},
		column{Header: "SANDBOX", Cell: func(d *adminv1.Deferral) string { return d.GetSandbox().GetId() }},
		column{Header: "FS", Cell: (*adminv1.Deferral).GetFsType},
		column{Header: "SIZE", Cell: func(d *adminv1.Deferral) string { return output.Bytes(d.GetSizeBytes()) }},
		column{Header: "AGE", Cell: func(d *adminv1.Deferral) string { return o.age(d.GetCreated().AsTime()) }},
		column{Header: "DRIVER", Cell: (*adminv1.Deferral).GetDriver, Wide: true},
		column{Header: "DEVICE", Cell: (*adminv1.Deferral).GetDevice, Wide: true},
		column{Header: "TARGET", Cell: (*adminv1.Deferral).GetTargetPath, Wide: true},
	)
}
