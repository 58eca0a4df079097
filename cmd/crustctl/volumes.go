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
	var d *driverOptions
	cmd := driverCommand(o, "volumes", "List the volumes of this node's pool: sizes, what they share, what was made from them", func(options *driverOptions, ctx context.Context, conn *grpc.ClientConn, cmd *cobra.Command) error {
		d = options
		d.extents, _ = cmd.Flags().GetBool("sharing")
		volumes, err := d.volumes(ctx, conn)
		if err != nil {
			return err
		}
		return d.format.Print(cmd.OutOrStdout(), &poolv1.ListObjectsResponse{Objects: volumes}, volumesView(volumes, d))
	})
	cmd.Flags().Bool("sharing", false, "look at every extent: what is shared, and in how many pieces a volume lies")
	return cmd
}

// volumes are those that CSI lists, with what the pool knows of them.
func (d *driverOptions) volumes(ctx context.Context, conn *grpc.ClientConn) ([]*poolv1.Object, error) {
	objects, err := d.objects(ctx, conn)
	if err != nil {
		return nil, err
	}
	var volumes []*poolv1.Object
	req := &csi.ListVolumesRequest{}
	for {
		resp, err := csi.NewControllerClient(conn).ListVolumes(ctx, req)
		if err != nil {
			return nil, err
		}
		for _, entry := range resp.GetEntries() {
			if o := objects[entry.GetVolume().GetVolumeId()]; o != nil { // else it was made just now
				volumes = append(volumes, o)
			}
		}
		if req.StartingToken = resp.GetNextToken(); req.GetStartingToken() == "" {
			return volumes, nil
		}
	}
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
