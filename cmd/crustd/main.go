// Crustd is the node daemon: it stands between the kubelet and a CSI driver, and lets sandboxes mount the filesystems of
// volumes that are to be deferred.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/crust"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/remote"
)

func main() {
	config := crust.Config{
		Drivers:        make([]crust.Driver, 1),
		Handlers:       []runtimehandler.Handler{remote.Handler{}},
		ShimHandler:    remote.Name,
		DefaultHandler: remote.Name,
	}
	var logging command.Logging
	cmd := &cobra.Command{
		Use:   "crustd",
		Short: "Let sandboxes mount the filesystems of CSI volumes",
		Long: `crustd serves CSI to the kubelet in the place of a driver. A volume whose parameter crust.dev/defer is "always" is
published without being mounted on the node: the sandbox that uses it mounts it inside. Everything else goes through to
the driver untouched.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if config.Log, err = logging.Logger(os.Stderr); err != nil {
				return err
			}
			daemon, err := crust.New(config)
			if err != nil {
				return err
			}
			return daemon.Run(cmd.Context())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&config.Drivers[0].Endpoint, "endpoint", "unix:///run/crust/csi.sock", "socket on which to serve CSI")
	flags.StringVar(&config.Drivers[0].Upstream, "driver-endpoint", "", "the CSI socket of the driver (required)")
	flags.StringVar(&config.RuntimeEndpoint, "runtime-endpoint", "unix:///run/crust/runtime.sock", "socket on which shims register their sandboxes")
	flags.StringVar(&config.StateDir, "state-dir", "/var/lib/crust", "directory of the journal; it must outlive reboots")
	if err := cmd.MarkFlagRequired("driver-endpoint"); err != nil {
		panic(err) // the flag is declared above
	}
	logging.Flags(cmd)
	command.Main(cmd)
}
