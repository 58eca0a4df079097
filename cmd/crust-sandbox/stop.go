package main

import (
	"time"

	"github.com/spf13/cobra"

	"crust.dev/crust/runtimehandler/sandbox"
)

func stopCommand(o *options) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "stop ID",
		Short: "Have a guest unmount everything and stop it",
		Long: `stop asks a sandbox to end and waits until it has. When the time is up it kills it, which its volumes survive as they would a
power failure. Of a sandbox that is dead it removes the traces.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return sandbox.Stop(cmd.Context(), o.root, args[0], timeout)
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait before killing it")
	return cmd
}
