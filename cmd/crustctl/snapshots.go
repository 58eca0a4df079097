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
	return listCommandOf(o, "snapshots", "List the snapshots of this node's pool: of what, what they share, what was made from them", pageSnapshots, snapshotsView)
}

func pageSnapshots(ctx context.Context, conn *grpc.ClientConn, token string) (ids []string, next string, err error) {
	resp, err := csi.NewControllerClient(conn).ListSnapshots(ctx, &csi.ListSnapshotsRequest{StartingToken: token})
	for _, entry := range resp.GetEntries() {
		ids = append(ids, entry.GetSnapshot().GetSnapshotId())
	}
	return ids, resp.GetNextToken(), err
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
