package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/protocol/rpc"
)

// probeTime is how long the one that is probed may take.
const probeTime = 10 * time.Second

// probe asks the plugin or the router that serves a socket whether it is ready (CSI, Probe). It is for the
// liveness of a router, which has no pool that crustctl could ask for.
func probe(ctx context.Context, endpoint string) error {
	socket, err := rpc.ParseEndpoint(endpoint)
	if err != nil {
		return err
	}
	conn, err := rpc.Dial(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	resp, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{})
	if err != nil {
		return fmt.Errorf("probe %s: %w", socket, rpc.FromWire(err))
	}
	if ready := resp.GetReady(); ready != nil && !ready.GetValue() {
		return errors.New("probe " + socket + ": it is not ready")
	}
	return nil
}
