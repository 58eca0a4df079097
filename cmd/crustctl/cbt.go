package main

import (
	"context"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"crust.dev/crust/cmd/crustctl/internal/backup"
	"crust.dev/crust/cmd/internal/output"
)

// cbtOptions are the flags of the subcommands of cbt.
type cbtOptions struct {
	driverOptions
	offset int64
	totals bool
}

func cbtCommand(o *options) *cobra.Command {
	c := &cbtOptions{driverOptions: driverOptions{options: o}}
	cmd := &cobra.Command{
		Use:   "cbt",
		Short: "Changed block tracking: what of a snapshot holds data, or has changed since another one",
		Long: `cbt asks the CSI driver of this node what a backup program would ask it, by CSI's SnapshotMetadata service. Any driver
that has that service will do. Snapshots are named by their CSI ids: crustctl snapshots lists them, and in Kubernetes they
are in the status of VolumeSnapshotContents, as snapshotHandle.`,
	}
	cmd.PersistentFlags().StringVar(&c.driverOptions.endpoint, "driver-endpoint", defaultDriverEndpoint, "the driver's own socket")
	cmd.AddCommand(
		c.rangesCommand("allocated SNAPSHOT", "Print the ranges of a snapshot that hold data", cobra.ExactArgs(1)),
		c.rangesCommand("delta SNAPSHOT BASE", "Print the ranges of a snapshot that may differ from an earlier one of the same volume", cobra.ExactArgs(2)),
		c.copyCommand(),
		c.basesCommand(),
		c.releaseCommand(),
	)
	return cmd
}

// ask asks for the ranges that the arguments are about: a snapshot, and maybe a base.
func (c *cbtOptions) ask(ctx context.Context, args []string) (m backup.Metadata, err error) {
	base := ""
	if len(args) > 1 {
		base = args[1]
	}
	err = c.dial(ctx, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		m, err = backup.Ask(ctx, csi.NewSnapshotMetadataClient(conn), args[0], base, c.offset)
		return err
	})
	return m, err
}

func (c *cbtOptions) rangesCommand(use, short string, args cobra.PositionalArgs) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  args,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := c.ask(cmd.Context(), args)
			if err != nil {
				return err
			}
			view := output.Views(rangesView(m.Ranges), totalsView(m))
			if c.totals {
				m.Ranges, view = nil, totalsView(m)
			}
			return c.format.Print(cmd.OutOrStdout(), m, view)
		},
	}
	cmd.Flags().Int64Var(&c.offset, "offset", 0, "the byte to begin at")
	cmd.Flags().BoolVar(&c.totals, "totals", false, "print the totals only")
	return cmd
}

func rangesView(ranges []backup.Range) output.View {
	type column = output.Column[backup.Range]
	return output.List(ranges, "There are no such ranges.",
		column{Header: "OFFSET", Cell: func(r backup.Range) string { return strconv.FormatInt(r.Offset, 10) }},
		column{Header: "BYTES", Cell: func(r backup.Range) string { return strconv.FormatInt(r.Size, 10) }},
		column{Header: "SIZE", Cell: func(r backup.Range) string { return output.Bytes(r.Size) }},
	)
}

func totalsView(m backup.Metadata) output.View {
	share := "0%"
	if m.Capacity > 0 {
		share = strconv.FormatFloat(100*float64(m.Total)/float64(m.Capacity), 'f', 1, 64) + "%"
	}
	return output.Fields(
		output.Field{Name: "Snapshot", Value: m.Snapshot},
		output.Field{Name: "Base", Value: m.Base},
		output.Field{Name: "Volume", Value: output.Bytes(m.Capacity)},
		output.Field{Name: "Ranges", Value: strconv.Itoa(m.Count)},
		output.Field{Name: "In them", Value: output.Bytes(m.Total) + ", " + share},
	)
}
