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

func volumesCommand(o *options) *cobra.Command {
	return listCommandOf(o, "volumes", "List the volumes of this node's pool: sizes, what they share, what was made from them", pageVolumes, volumesView)
}

func pageVolumes(ctx context.Context, conn *grpc.ClientConn, token string) (ids []string, next string, err error) {
	resp, err := csi.NewControllerClient(conn).ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: token})
	for _, entry := range resp.GetEntries() {
		ids = append(ids, entry.GetVolume().GetVolumeId())
	}
	return ids, resp.GetNextToken(), err
}

func volumesView(volumes []*poolv1.Object, d *driverOptions) output.View {
	type column = output.Column[*poolv1.Object]
	return output.List(volumes, "There are no volumes in this pool.", slices.Concat([]column{
		{Header: "VOLUME", Cell: (*poolv1.Object).GetId},
		{Header: "NAME", Cell: (*poolv1.Object).GetName},
		{Header: "STATE", Cell: (*poolv1.Object).GetState},
		{Header: "FS", Cell: (*poolv1.Object).GetFsType},
		{Header: "SIZE", Cell: func(o *poolv1.Object) string { return output.Bytes(o.GetSizeBytes()) }},
	}, sharing(d.extents), []column{
		{Header: "MADE FROM", Cell: (*poolv1.Object).GetSource},
		{Header: "MADE FROM IT", Cell: func(o *poolv1.Object) string { return fmt.Sprint(len(o.GetMadeFromIt())) }},
		{Header: "PUBLISHED AT", Cell: func(o *poolv1.Object) string { return strings.Join(o.GetTargets(), ",") }, Wide: true},
		{Header: "IDS OF WHAT WAS MADE FROM IT", Cell: func(o *poolv1.Object) string { return strings.Join(o.GetMadeFromIt(), ",") }, Wide: true},
		{Header: "AGE", Cell: func(o *poolv1.Object) string { return d.age(o.GetCreated().AsTime()) }},
	})...)
}
