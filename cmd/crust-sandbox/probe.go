package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/qemu/image"
)

// defaultAccelCache is where it is noted which accelerator works.
const defaultAccelCache = "/run/crust/accel.json"

func probeCommand(o *options) *cobra.Command {
	var imageDir, cache string
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Find out whether KVM really runs a guest on this machine",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := o.logging.Logger(os.Stderr)
			if err != nil {
				return err
			}
			guest, err := image.Load(imageDir)
			if err != nil {
				return err
			}
			accel, err := qemu.ProbeAccel(cmd.Context(), qemu.Probe{Image: guest, Cache: cache, Log: log})
			if err != nil {
				return err
			}
			if o.output == "json" {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]qemu.Accel{"accel": accel})
			}
			text := "kvm: guests run on the processor"
			if accel == qemu.TCG {
				text = "tcg: guests are emulated, which is slow"
			}
			fmt.Fprintln(cmd.OutOrStdout(), text)
			return nil
		},
	}
	cmd.Flags().StringVar(&imageDir, "image", defaultImageDir, "directory with the guest's image; see crust-sandbox image")
	cmd.Flags().StringVar(&cache, "accel-cache", defaultAccelCache, "where to note what was found, until the next boot")
	return cmd
}
