package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/crustctl/internal/doctor"
	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/protocol/rpc"
)

// doctorPatience is how long doctor waits for crustd, whose own checks take 5 s at most.
const doctorPatience = 15 * time.Second

func doctorCommand(o *options) *cobra.Command {
	var n doctor.Node
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look over the node: crustd, kernel, kubelet, runtimes, leftovers; each finding with its cure",
		Long: `doctor changes nothing. It works without crustd, too: then it says so and looks at the rest. The exit code is 1 if it has
found an error, which is something that keeps deferred volumes from working; warnings do not count.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			socket, err := rpc.ParseEndpoint(o.endpoint)
			if err != nil {
				return fmt.Errorf("--admin-endpoint: %w", err)
			}
			n.AdminSocket, n.Version = socket, command.Version()
			o.ask(cmd, &n)
			report := doctor.Examine(cmd.Context(), n)
			if err := o.format.Print(cmd.OutOrStdout(), report, reportView(report)); err != nil {
				return err
			}
			if report.Errors > 0 {
				return &command.ExitError{Code: 1}
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&n.Root, "root", "/", "where the node's filesystem is")
	flags.StringVar(&n.KubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's directory (its --root-dir)")
	flags.StringVar(&n.ConfigFile, "config", "/etc/crust/crustd.yaml", "crustd's configuration file")
	return cmd
}

// ask has crustd say what it knows.
func (o *options) ask(cmd *cobra.Command, n *doctor.Node) {
	patient := *o
	patient.timeout = min(o.timeout, doctorPatience)
	n.DaemonErr = patient.call(cmd.Context(), func() func() { return patience(cmd) }, func(ctx context.Context, c adminv1.AdminClient) error {
		status, err := c.GetStatus(ctx, &adminv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		list, err := c.ListDeferrals(ctx, &adminv1.ListDeferralsRequest{})
		if err != nil {
			return err
		}
		n.Status, n.Deferrals = status, list.GetDeferrals()
		return nil
	})
}

// reportView shows findings one below the other: they are sentences.
func reportView(r doctor.Report) output.View {
	return func(w io.Writer, _ bool) error {
		for _, f := range r.Findings {
			fmt.Fprintf(w, "%-9s %s: %s\n", "["+string(f.Severity)+"]", f.Check, output.Printable(f.What))
			if f.Severity != doctor.OK {
				fmt.Fprintf(w, "%10swhy:  %s\n%10scure: %s\n", "", output.Printable(f.Why), "", output.Printable(f.Cure))
			}
		}
		_, err := fmt.Fprintf(w, "\n%d errors, %d warnings\n", r.Errors, r.Warnings)
		return err
	}
}
