package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

func statusCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show what crustd works with, and whether that is in order",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.admin(cmd, func(ctx context.Context, c adminv1.AdminClient) error {
				resp, err := c.GetStatus(ctx, &adminv1.GetStatusRequest{})
				if err != nil {
					return err
				}
				return o.format.Print(cmd.OutOrStdout(), resp, o.statusView(resp))
			})
		},
	}
}

func (o *options) statusView(resp *adminv1.GetStatusResponse) output.View {
	return output.Views(
		output.Fields(
			output.Field{Name: "Version", Value: resp.GetVersion()},
			output.Field{Name: "Running for", Value: o.age(resp.GetStarted().AsTime())},
			output.Field{Name: "Configuration", Value: resp.GetConfigFile()},
			output.Field{Name: "State", Value: resp.GetStateDir()},
			output.Field{Name: "Socket for shims", Value: resp.GetRuntimeEndpoint()},
			output.Field{Name: "Socket for drivers", Value: resp.GetKepEndpoint()},
			output.Field{Name: "Default policy", Value: resp.GetDefaultPolicy()},
			output.Field{Name: "Default handler", Value: resp.GetDefaultHandler()},
		),
		output.List(resp.GetChecks(), "There are no checks.",
			output.Column[*adminv1.Check]{Header: "CHECK", Cell: (*adminv1.Check).GetName},
			output.Column[*adminv1.Check]{Header: "STATE", Cell: func(c *adminv1.Check) string {
				if c.GetOk() {
					return "ok"
				}
				return c.GetMessage()
			}},
		),
		output.List(resp.GetDrivers(), "There are no drivers.",
			output.Column[*adminv1.Driver]{Header: "DRIVER", Cell: (*adminv1.Driver).GetName},
			output.Column[*adminv1.Driver]{Header: "SERVED AT", Cell: (*adminv1.Driver).GetEndpoint},
			output.Column[*adminv1.Driver]{Header: "ITS OWN SOCKET", Cell: (*adminv1.Driver).GetUpstream},
		),
		output.List(resp.GetHandlers(), "There are no handlers.",
			output.Column[*adminv1.Handler]{Header: "HANDLER", Cell: (*adminv1.Handler).GetName},
			output.Column[*adminv1.Handler]{Header: "RUNTIME CLASS HANDLERS", Cell: func(h *adminv1.Handler) string { return strings.Join(h.GetRuntimeClasses(), ",") }},
			output.Column[*adminv1.Handler]{Header: "CAN", Cell: func(h *adminv1.Handler) string { return strings.Join(h.GetCapabilities(), ",") }},
			output.Column[*adminv1.Handler]{Header: "ROOTS", Cell: func(h *adminv1.Handler) string { return strings.Join(h.GetRoots(), ",") }, Wide: true},
		),
	)
}
