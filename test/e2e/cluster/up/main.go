// Up runs a one-node Kubernetes with this project's storage until it is interrupted, and then takes everything down. It is
// run as root, from the root of the repository.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"crust.dev/crust/test/e2e/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "cluster: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	bin, err := cluster.Build(ctx, root, os.Stderr)
	if err != nil {
		return err
	}
	c, err := cluster.Start(ctx, root, bin, os.TempDir(), os.Stderr)
	if err != nil {
		return err
	}
	fmt.Printf("cluster: up. In another terminal:\n  export KUBECONFIG=%s PATH=%s:$PATH\n  kubectl get nodes,runtimeclasses,storageclasses\nCtrl-C ends it.\n", c.Kubeconfig(), bin)
	<-ctx.Done()
	return c.Close()
}
