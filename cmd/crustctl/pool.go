package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"crust.dev/crust/cmd/internal/output"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
	"crust.dev/crust/protocol/rpc"
)

// defaultDriverEndpoint is where crust-csi serves unless it is told otherwise.
const defaultDriverEndpoint = "unix:///run/crust/csi.sock"

// driverOptions are the flags of the subcommands that talk to crust-csi.
type driverOptions struct {
	*options
	endpoint string
	extents  bool
}

// driverCommand is a subcommand that talks to crust-csi.
func driverCommand(o *options, use, short string, run func(*driverOptions, context.Context, *grpc.ClientConn, *cobra.Command) error) *cobra.Command {
	d := &driverOptions{options: o}
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return d.dial(cmd.Context(), func(ctx context.Context, conn *grpc.ClientConn) error { return run(d, ctx, conn, cmd) })
		},
	}
	cmd.Flags().StringVar(&d.endpoint, "driver-endpoint", defaultDriverEndpoint, "crust-csi's own socket")
	return cmd
}

// dial calls crust-csi.
func (d *driverOptions) dial(ctx context.Context, fn func(context.Context, *grpc.ClientConn) error) (err error) {
	path, err := rpc.ParseEndpoint(d.endpoint)
	if err != nil {
		return fmt.Errorf("--driver-endpoint: %w", err)
	}
	conn, err := rpc.Dial(path, grpc.WithChainUnaryInterceptor(fromWire))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	if err := fn(ctx, conn); err != nil {
		return fmt.Errorf("crust-csi on %s: %w", d.endpoint, err)
	}
	return nil
}

func poolCommand(o *options) *cobra.Command {
	return driverCommand(o, "pool", "Show how full the storage pool of this node is, and what it holds", func(d *driverOptions, ctx context.Context, conn *grpc.ClientConn, cmd *cobra.Command) error {
		resp, err := poolv1.NewPoolClient(conn).GetStatus(ctx, &poolv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		return d.format.Print(cmd.OutOrStdout(), resp, poolView(resp))
	})
}

func poolView(p *poolv1.GetStatusResponse) output.View {
	freeze := "crash-consistent only: crust-csi was started without --crustd-endpoint"
	if p.GetCanFreeze() {
		freeze = "crash-consistent or filesystem-consistent"
	}
	return output.Fields(
		output.Field{Name: "Pool", Value: p.GetPool()},
		output.Field{Name: "Driver", Value: p.GetDriver()},
		output.Field{Name: "Directory", Value: p.GetDirectory()},
		output.Field{Name: "Size", Value: output.Bytes(p.GetTotalBytes())},
		output.Field{Name: "Free", Value: output.Bytes(p.GetFreeBytes())},
		output.Field{Name: "Promised to volumes", Value: output.Bytes(p.GetPromisedBytes())},
		output.Field{Name: "Volumes", Value: fmt.Sprint(p.GetVolumes())},
		output.Field{Name: "Snapshots", Value: fmt.Sprint(p.GetSnapshots())},
		output.Field{Name: "Group snapshots", Value: fmt.Sprint(p.GetGroups())},
		output.Field{Name: "Snapshots are", Value: freeze},
	)
}

// listCommandOf is a subcommand that lists objects of the pool: those that CSI lists, page by page, with what the pool
// knows of them.
func listCommandOf(o *options, use, short string, page func(context.Context, *grpc.ClientConn, string) (ids []string, next string, err error),
	view func([]*poolv1.Object, *driverOptions) output.View) *cobra.Command {
	cmd := driverCommand(o, use, short, func(d *driverOptions, ctx context.Context, conn *grpc.ClientConn, cmd *cobra.Command) error {
		d.extents, _ = cmd.Flags().GetBool("sharing")
		objects, err := d.objects(ctx, conn)
		if err != nil {
			return err
		}
		var listed []*poolv1.Object
		for token := ""; ; {
			ids, next, err := page(ctx, conn, token)
			if err != nil {
				return err
			}
			for _, id := range ids {
				if o := objects[id]; o != nil { // else it was made just now
					listed = append(listed, o)
				}
			}
			if token = next; token == "" {
				return d.format.Print(cmd.OutOrStdout(), &poolv1.ListObjectsResponse{Objects: listed}, view(listed, d))
			}
		}
	})
	cmd.Flags().Bool("sharing", false, "look at every extent: what is shared, and in how many pieces the data lies")
	return cmd
}

// objects are those of the pool by their ids.
func (d *driverOptions) objects(ctx context.Context, conn *grpc.ClientConn) (map[string]*poolv1.Object, error) {
	resp, err := poolv1.NewPoolClient(conn).ListObjects(ctx, &poolv1.ListObjectsRequest{Extents: d.extents})
	if err != nil {
		return nil, err
	}
	byID := map[string]*poolv1.Object{}
	for _, o := range resp.GetObjects() {
		byID[o.GetId()] = o
	}
	return byID, nil
}

// The columns that volumes and snapshots have in common.

func sharing(extents bool) []output.Column[*poolv1.Object] {
	type column = output.Column[*poolv1.Object]
	columns := []column{{Header: "USED", Cell: func(o *poolv1.Object) string { return output.Bytes(o.GetAllocatedBytes()) }}}
	if extents {
		columns = append(columns,
			column{Header: "SHARED", Cell: func(o *poolv1.Object) string { return output.Bytes(o.GetSharedBytes()) }},
			column{Header: "PIECES", Cell: func(o *poolv1.Object) string { return fmt.Sprint(o.GetExtents()) }},
		)
	}
	return columns
}
