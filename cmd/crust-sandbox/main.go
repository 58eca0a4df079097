// Crust-sandbox runs a QEMU microVM that mounts deferred volumes inside, as the shim of a runtime would.
package main

import (
	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/runtimehandler/sandbox"
)

// options are the flags of all subcommands.
type options struct {
	root    string
	output  string
	logging command.Logging
}

func main() {
	var o options
	root := &cobra.Command{
		Use:   "crust-sandbox",
		Short: "Run microVMs that mount deferred volumes inside",
	}
	root.PersistentFlags().StringVar(&o.root, "root", sandbox.DefaultRoot, "where the directories of sandboxes are")
	root.PersistentFlags().StringVarP(&o.output, "output", "o", "text", "text or json")
	o.logging.Flags(root)
	root.AddCommand(runCommand(&o), execCommand(&o), listCommand(&o), stopCommand(&o), imageCommand(&o), probeCommand(&o))
	command.Main(root)
}
