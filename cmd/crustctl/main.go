// Crustctl is the operator's command on a node: what is deferred there, in which sandbox, how full it is, and whether the
// node is in order.
package main

import (
	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/command"
)

func main() { command.Main(newCommand(&options{})) }

// newCommand puts the subcommands together. Each is in a file of its own, and is added here and nowhere else.
func newCommand(o *options) *cobra.Command {
	root := &cobra.Command{
		Use:   "crustctl",
		Short: "Look after the deferred volumes of this node",
		Long: `crustctl talks to the crustd of this node. It has to run as root.

A volume is named by its target path, by its volume id, or by its pod: the pod's uid, or namespace/name.`,
	}
	o.flags(root)
	root.AddCommand(
		listCommand(o),
		describeCommand(o),
		statsCommand(o),
		expandCommand(o),
		gcCommand(o),
		statusCommand(o),
		doctorCommand(o),
		poolCommand(o),
		volumesCommand(o),
		snapshotsCommand(o),
		imagesCommand(o),
		cbtCommand(o),
		uninstallCheckCommand(o),
	)
	return root
}
