package main

import (
	"errors"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/crustctl/internal/backup"
	"crust.dev/crust/cmd/internal/output"
)

func (c *cbtOptions) copyCommand() *cobra.Command {
	var image backup.Image
	cmd := &cobra.Command{
		Use:   "copy SNAPSHOT [BASE] --source DEVICE --image FILE [--base-image FILE]",
		Short: "Write an image file of a snapshot: all of its data, or the image of BASE and what has changed since",
		Long: `copy is a backup program: it reads from DEVICE what of SNAPSHOT holds data, or with BASE what has changed since BASE, and
writes FILE, a sparse image of the whole volume. DEVICE has the snapshot's data: it is a volume made from the snapshot, that
nobody writes to. With BASE, --base-image is the image that an earlier run has written of BASE.

Then the whole image is compared with DEVICE. Only if they are the same, and on disk, does FILE appear.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if image.Base == "" && len(args) > 1 {
				// The changes would be of no use.
				return errors.New("BASE needs --base-image, the image that was written of it")
			}
			m, err := c.ask(cmd.Context(), args)
			if err != nil {
				return err
			}
			err = image.Write(cmd.Context(), m)
			if errors.Is(err, errdefs.ErrAlreadyExists) {
				return errors.Join(err, errors.New("choose another --image; none is ever overwritten"))
			}
			if err != nil {
				return err
			}
			written := copied{Image: image.Path, Capacity: m.Capacity, Ranges: m.Count, Copied: m.Total, Compared: m.Capacity}
			return c.format.Print(cmd.OutOrStdout(), written, written.view())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&image.Source, "source", "", "device or file with the snapshot's data")
	flags.StringVar(&image.Path, "image", "", "file to write; it must not exist")
	flags.StringVar(&image.Base, "base-image", "", "image of BASE")
	for _, required := range []string{"source", "image"} {
		if err := cmd.MarkFlagRequired(required); err != nil {
			panic(err) // the flag is declared above
		}
	}
	return cmd
}

// copied is what copy has done, in bytes.
type copied struct {
	Image    string `json:"image"`
	Capacity int64  `json:"capacity_bytes"`
	Ranges   int    `json:"ranges"`
	Copied   int64  `json:"copied_bytes"`
	Compared int64  `json:"compared_bytes"`
}

func (c copied) view() output.View {
	return output.Fields(
		output.Field{Name: "Image", Value: c.Image},
		output.Field{Name: "Volume", Value: output.Bytes(c.Capacity)},
		output.Field{Name: "Copied", Value: output.Bytes(c.Copied) + " in " + strconv.Itoa(c.Ranges) + " ranges"},
		output.Field{Name: "Compared", Value: output.Bytes(c.Compared) + ", the same as the source"},
	)
}
