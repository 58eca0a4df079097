package main

import (
	"context"
	"flag"
	"fmt"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/router"
)

// modeRouter is the mode of a process that has no pool and passes calls on to those that do.
const modeRouter = csiplugin.Mode("router")

// routeFlags are the flags for both ends of the way from the router to a node. The certificates are those of this process, whichever
// end it is.
func routeFlags(flags *flag.FlagSet, o *options) {
	flags.StringVar(&o.config.Routed.Listen, "route-listen", "", "`host:port` on which to serve the router (default: nowhere)")
	files := &o.config.Routed.Files
	flags.StringVar(&files.Cert, "route-cert", "", "`file` with the certificate for the way between router and node, for node.DRIVER-NAME or router.DRIVER-NAME")
	flags.StringVar(&files.Key, "route-key", "", "`file` with its private key")
	flags.StringVar(&files.CA, "route-ca", "", "`file` with the certificates of authorities that the other end's certificate may be from")
	flags.IntVar(&o.routePort, "route-port", router.DefaultPort, "with --mode=router: TCP `port` of the nodes' --route-listen")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "with --mode=router: `file` that says which API server knows the nodes (default: that of the pod)")
}

// route is run for the mode router.
func route(ctx context.Context, o options) error {
	c := o.config
	for name, value := range map[string]string{"--node-id": c.NodeID, "--pool": c.PoolDir, "--route-listen": c.Routed.Listen, "--crustd-endpoint": c.Crustd, "--metrics-address": c.Metrics} {
		if value != "" {
			return fmt.Errorf("%s is for a node and does not go with --mode=%s", name, modeRouter)
		}
	}
	r, err := router.New(router.Config{
		Endpoint: c.Endpoint, DriverName: c.DriverName, Version: c.Version, Port: o.routePort, Files: c.Routed.Files, Kubeconfig: o.kubeconfig, Log: c.Log,
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}
