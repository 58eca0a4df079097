package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"crust.dev/crust/cmd/crustctl/internal/uninstall"
	"crust.dev/crust/cmd/internal/output"
)

func uninstallCheckCommand(o *options) *cobra.Command {
	var kubeconfig, driver string
	cmd := &cobra.Command{
		Use:   "uninstall-check",
		Short: "Fail if pods use volumes of the driver, with a list of them; for the cluster, not only this node",
		Long: `uninstall-check asks the API server for pods that use volumes of the driver, lists them, and exits with 1 if there are
any. A deferred volume can only be given back through the crustd that knows of it, so crustd and the driver have to stay until
there are none. The Helm chart runs this before an uninstall.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := clientcmd.BuildConfigFromFlags("", kubeconfig) // without a file that of the pod
			if err != nil {
				return fmt.Errorf("API server: %w; outside of a pod, say with --kubeconfig how to reach it", err)
			}
			config.UserAgent = "crustctl"
			api, err := kubernetes.NewForConfig(config)
			if err != nil {
				return fmt.Errorf("API server: %w", err)
			}
			return uninstallCheck(cmd, o, api, driver)
		},
	}
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "file that says how to reach the API server (default: that of the pod)")
	cmd.Flags().StringVar(&driver, "driver", "csi.crust.dev", "name of the CSI driver")
	return cmd
}

// uninstallCheck prints who is in the way.
func uninstallCheck(cmd *cobra.Command, o *options, api kubernetes.Interface, driver string) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), min(o.timeout, time.Minute))
	defer cancel()
	users, err := uninstall.Users(ctx, api, driver)
	if err != nil {
		return fmt.Errorf("look for pods with volumes of %s: %w; nothing should be removed before that is known", driver, err)
	}
	type column = output.Column[uninstall.User]
	view := output.List(users, "No pod uses a volume of "+driver+".",
		column{Header: "NAMESPACE", Cell: func(u uninstall.User) string { return u.Namespace }},
		column{Header: "POD", Cell: func(u uninstall.User) string { return u.Pod }},
		column{Header: "NODE", Cell: func(u uninstall.User) string { return u.Node }},
		column{Header: "CLAIM", Cell: func(u uninstall.User) string { return u.Claim }},
		column{Header: "VOLUME", Cell: func(u uninstall.User) string { return u.Volume }})
	if err := view(cmd.OutOrStdout(), true); err != nil {
		return err
	}
	if len(users) > 0 {
		return fmt.Errorf("%d volumes of %s are in use by the pods above: delete these pods or move them elsewhere, then uninstall again", len(users), driver)
	}
	return nil
}
