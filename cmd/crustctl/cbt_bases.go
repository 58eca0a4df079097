package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"crust.dev/crust/cmd/internal/output"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

func (c *cbtOptions) basesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "bases",
		Short: "List the deleted snapshots that are kept to be compared with",
		Long: `bases lists what the parameter crust.dev/keep-bases of a VolumeSnapshotClass has kept: snapshots that were deleted, and
whose data is there all the same, so that the changes since them can be told. HELD is what only they take of the pool.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.dial(cmd.Context(), func(ctx context.Context, conn *grpc.ClientConn) error {
				resp, err := poolv1.NewBasesClient(conn).ListBases(ctx, &poolv1.ListBasesRequest{})
				if err != nil {
					return err
				}
				return c.format.Print(cmd.OutOrStdout(), resp, c.basesView(resp))
			})
		},
	}
}

func (c *cbtOptions) basesView(resp *poolv1.ListBasesResponse) output.View {
	type column = output.Column[*poolv1.Base]
	held := int64(0)
	for _, b := range resp.GetBases() {
		held += b.GetHeldBytes()
	}
	return output.Views(
		output.List(resp.GetBases(), "No deleted snapshot is kept.",
			column{Header: "BASE", Cell: (*poolv1.Base).GetId},
			column{Header: "VOLUME", Cell: (*poolv1.Base).GetVolume},
			column{Header: "SIZE", Cell: func(b *poolv1.Base) string { return output.Bytes(b.GetSizeBytes()) }},
			column{Header: "HELD", Cell: func(b *poolv1.Base) string { return output.Bytes(b.GetHeldBytes()) }},
			column{Header: "CUT", Cell: func(b *poolv1.Base) string { return c.age(b.GetCreated().AsTime()) }},
			column{Header: "DELETED", Cell: func(b *poolv1.Base) string { return c.age(b.GetDeleted().AsTime()) }},
			column{Header: "KEEP", Cell: func(b *poolv1.Base) string { return strconv.Itoa(int(b.GetKeep())) }, Wide: true},
		),
		output.Fields(output.Field{Name: "Held by all", Value: output.Bytes(held)}),
	)
}

func (c *cbtOptions) releaseCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "release BASE",
		Short: "Give up a deleted snapshot that is kept to be compared with; the next backup based on it will be a full one",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.dial(cmd.Context(), func(ctx context.Context, conn *grpc.ClientConn) error {
				req := &poolv1.ReleaseBaseRequest{Id: args[0]}
				resp, err := poolv1.NewBasesClient(conn).ReleaseBase(ctx, req)
				if err != nil {
					return err
				}
				done := fmt.Sprintf("%s is not kept any more.", args[0])
				return c.format.Print(cmd.OutOrStdout(), resp, output.Fields(output.Field{Name: "Released", Value: done}))
			})
		},
	}
}
