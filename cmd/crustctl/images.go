package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"crust.dev/crust/cmd/internal/output"
	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
)

func imagesCommand(o *options) *cobra.Command {
	list := driverCommand(o, "images", "List the backing images of this node's pool, and how far they are", func(d *driverOptions, ctx context.Context, conn *grpc.ClientConn, cmd *cobra.Command) error {
		resp, err := imagesv1.NewImagesClient(conn).ListImages(ctx, &imagesv1.ListImagesRequest{})
		if err != nil {
			return err
		}
		slices.SortFunc(resp.GetImages(), func(a, b *imagesv1.Image) int { return cmp.Compare(a.GetName(), b.GetName()) })
		return d.format.Print(cmd.OutOrStdout(), resp, d.imagesView(resp))
	})
	list.AddCommand(
		imageCommand(o, "prepare HANDLE", `Begin to prepare the image of a handle ("bi://backing?..."), before a volume is made from it`, func(ctx context.Context, c imagesv1.ImagesClient, handle string) error {
			_, err := c.PrepareImage(ctx, &imagesv1.PrepareImageRequest{Handle: handle})
			return err
		}),
		imageCommand(o, "delete NAME", "Delete an image that no snapshot stands for; what was made from it stays", func(ctx context.Context, c imagesv1.ImagesClient, name string) error {
			_, err := c.DeleteImage(ctx, &imagesv1.DeleteImageRequest{Name: name})
			return err
		}),
	)
	return list
}

// imageCommand is a subcommand that does something with one image, and says nothing if that is done.
func imageCommand(o *options, use, short string, do func(context.Context, imagesv1.ImagesClient, string) error) *cobra.Command {
	cmd := driverCommand(o, use, short, func(_ *driverOptions, ctx context.Context, conn *grpc.ClientConn, cmd *cobra.Command) error {
		return do(ctx, imagesv1.NewImagesClient(conn), cmd.Flags().Arg(0))
	})
	cmd.Args = cobra.ExactArgs(1)
	return cmd
}

func (d *driverOptions) imagesView(resp *imagesv1.ListImagesResponse) output.View {
	type column = output.Column[*imagesv1.Image]
	return output.List(resp.GetImages(), "There are no backing images in this pool.",
		column{Header: "NAME", Cell: (*imagesv1.Image).GetName},
		column{Header: "STATE", Cell: (*imagesv1.Image).GetState},
		column{Header: "PROGRESS", Cell: progress},
		column{Header: "SIZE", Cell: func(i *imagesv1.Image) string { return output.Bytes(i.GetSizeBytes()) }},
		column{Header: "FORMAT", Cell: (*imagesv1.Image).GetFormat},
		column{Header: "FROM", Cell: func(i *imagesv1.Image) string { return cmp.Or(i.GetUrl(), i.GetVolumeId()) }},
		column{Header: "MADE BY", Cell: (*imagesv1.Image).GetOrigin},
		column{Header: "AGE", Cell: func(i *imagesv1.Image) string { return d.age(i.GetCreated().AsTime()) }},
		column{Header: "ERROR", Cell: (*imagesv1.Image).GetError},
		column{Header: "CONSISTENCY", Cell: (*imagesv1.Image).GetConsistency, Wide: true},
		column{Header: "FILE", Cell: (*imagesv1.Image).GetExportPath, Wide: true},
		column{Header: "SHA-512", Cell: (*imagesv1.Image).GetChecksum, Wide: true},
		column{Header: "HANDLE", Cell: (*imagesv1.Image).GetHandle, Wide: true},
	)
}

// progress is how far an image is, for people.
func progress(i *imagesv1.Image) string {
	switch done, total := i.GetDoneBytes(), i.GetTotalBytes(); {
	case total > 0:
		return fmt.Sprintf("%s of %s (%d%%)", output.Bytes(done), output.Bytes(total), int(100*float64(done)/float64(total)))
	case done > 0:
		return output.Bytes(done)
	}
	return ""
}
