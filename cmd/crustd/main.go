// Crustd is the node daemon: it stands between the kubelet and a CSI driver, and lets sandboxes mount the filesystems of
// volumes that are to be deferred.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/crust"
	"crust.dev/crust/runtimehandler/kata/assist"
)

func main() {
	assist.Main() // does not return in a process that the kata handler has started to work on a device
	command.Main(newCommand())
}

func newCommand() *cobra.Command { return newCommandWith(&options{}) }

func newCommandWith(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "crustd",
		Short: "Let sandboxes mount the filesystems of CSI volumes",
		Long: `crustd serves CSI to the kubelet in the place of a driver. A volume whose parameter crust.dev/defer is "always" is
published without being mounted on the node: the sandbox that uses it mounts it inside. Everything else goes through to
the driver untouched.

It is configured by a file, by flags, or by both; a flag counts for more than the file. docs/configuration.md describes
every key.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.checkConfig {
				return o.check(cmd)
			}
			config, err := o.load(os.Stderr)
			if err != nil {
				return err
			}
			daemon, err := crust.New(config)
			if err != nil {
				return err
			}
			return daemon.Run(cmd.Context())
		},
	}
	o.flags = cmd.Flags()
	o.declare()
	return cmd
}

// check checks the configuration, and as much of the node as can be seen without changing it.
func (o *options) check(cmd *cobra.Command) error {
	config, err := o.load(os.Stderr)
	if err != nil {
		return fmt.Errorf("the configuration is not valid:\n%w", err)
	}
	daemon, err := crust.New(config)
	if err != nil {
		return fmt.Errorf("the configuration is not valid:\n%w", err)
	}
	if err := daemon.Check(); err != nil {
		return fmt.Errorf("the configuration is valid, but crustd could not run with it here:\n%w", err)
	}
	out := cmd.OutOrStdout()
	fmt.Fprintln(out, "the configuration is valid")
	for _, d := range config.Drivers {
		fmt.Fprintf(out, "  driver %s is served at %s, registered with the kubelet: %t\n", d.Upstream, d.Endpoint, d.Register)
	}
	for _, h := range config.Handlers {
		fmt.Fprintf(out, "  handler %s\n", h.Name())
	}
	fmt.Fprintf(out, "  %d handlers of RuntimeClasses, default policy %s, an API server to ask: %t\n",
		len(config.RuntimeClasses), config.DefaultPolicy, config.Kubernetes != nil)
	fmt.Fprintf(out, "  state in %s\n", config.StateDir)
	return nil
}
