package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"crust.dev/crust/cmd/internal/output"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

func snapshotsCommand(o *options) *cobra.Command {
	cmd := driverCommand(o, "snapshots", "List the snapshots of this node's pool: of what, what they share, what was made from them", func(d *driverOptions, ctx context.Context, conn *grpc.ClientConn, cmd *cobra.Command) error {
		d.extents, _ = cmd.Flags().GetBool("sharing")
		snapshots, err := d.snapshots(ctx, conn)
		if err != nil {
			return err
		}
		return d.format.Print(cmd.OutOrStdout(), &poolv1.ListObjectsResponse{Objects: snapshots}, snapshotsView(snapshots, d))
	})
	cmd.Flags().Bool("sharing", false, "look at every extent: what is shared, and in how many pieces a snapshot lies")
	return cmd
}

// snapshots are those that CSI lists, with what the pool knows of them.
func (d *driverOptions) snapshots(ctx context.Context, conn *grpc.ClientConn) ([]*poolv1.Object, error) {
	objects, err := d.objects(ctx, conn)
	if err != nil {
		return nil, err
	}
	var snapshots []*poolv1.Object
	req := &csi.ListSnapshotsRequest{}
	for {
		resp, err := csi.NewControllerClient(conn).ListSnapshots(ctx, req)
		if err != nil {
			return nil, err
		}
		for _, entry := range resp.GetEntries() {
			if o := objects[entry.GetSnapshot().GetSnapshotId()]; o != nil { // else it was cut just now
				snapshots = append(snapshots, o)
			}
		}
		if req.StartingToken = resp.GetNextToken(); req.GetStartingToken() == "" {
			return snapshots, nil
		}
	}
}

func snapshotsView(snapshots []*poolv1.Object, d *driverOptions) output.View {
	type column = output.Column[*poolv1.Object]
	return output.List(snapshots, "There are no snapshots in this pool.", slices.Concat([]column{
		{Header: "SNAPSHOT", Cell: (*poolv1.Object).GetId},
		{Header: "NAME", Cell: (*poolv1.Object).GetName},
		{Header: "OF VOLUME", Cell: (*poolv1.Object).GetSource},
		{Header: "STATE", Cell: (*poolv1.Object).GetState},
		{Header: "SIZE", Cell: func(o *poolv1.Object) string { return output.Bytes(o.GetSizeBytes()) }},
	}, sharing(d.extents), []column{
		{Header: "GROUP", Cell: (*poolv1.Object).GetGroup},
		{Header: "MADE FROM IT", Cell: func(o *poolv1.Object) string { return fmt.Sprint(len(o.GetMadeFromIt())) }},
		{Header: "IDS OF WHAT WAS MADE FROM IT", Cell: func(o *poolv1.Object) string { return strings.Join(o.GetMadeFromIt(), ",") }, Wide: true},
		{Header: "AGE", Cell: func(o *poolv1.Object) string { return d.age(o.GetCreated().AsTime()) }},
	})...)
}
