package shim_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/shim"
)

// machine is what a shim has already: a virtual machine with hot-plug, and a connection to the agent in it.
type machine interface {
	shim.VM
	PID() int
	Agent() guestv1.TTRPCAgentService
	Start(ctx context.Context) error
	Stop(ctx context.Context) error
}

// runPod is all that a shim adds for volumes to be mounted in its sandbox. mounts are those of the container's OCI
// specification; the ones that are no deferrals are handed to rest.
func runPod(ctx context.Context, vm machine, id string, mounts []shim.Mount, rest func(shim.Mount) error) error {
	if err := vm.Start(ctx); err != nil {
		return err
	}
	address := "/run/example/" + id + ".sock"
	listener, err := rpc.Listen(ctx, address) // crustd tries it when the sandbox registers
	if err != nil {
		return err
	}
	client, err := shim.Connect(ctx, "/run/crust/runtime.sock", shim.Sandbox{
		ID:      id,
		Runtime: "example",
		Address: address,
		VMMPID:  vm.PID(), // crustd gives no volume to another while this process lives
		FSTypes: []string{"ext4", "xfs"},
		Capabilities: runtimehandler.Capabilities{
			Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true, Freeze: true,
		},
	}, slog.With("sandbox", id))
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer client.Close()
	volumes := shim.NewVolumes(client, vm, vm.Agent())
	serving, stop := context.WithCancel(ctx)
	defer stop()
	go serve(serving, listener, volumes)

	// Attach, check or format, mount, report, bind: for those mounts that are deferrals.
	deferrals, err := volumes.Mount(ctx, mounts)
	if err != nil {
		return err // the pod must not start: there is nothing on the host that could stand in
	}
	for i, m := range mounts {
		if _, ok := deferrals[i]; !ok {
			if err := rest(m); err != nil {
				return err
			}
		}
	}

	<-ctx.Done() // the pod runs

	ctx = context.WithoutCancel(ctx)
	if err := volumes.Release(ctx); err != nil { // unmount, detach, report
		slog.Error("volumes are taken back after the machine's end", "err", err)
	}
	if err := vm.Stop(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second) // if crustd is not there, it finds out when this process has ended
	defer cancel()
	return volumes.ReleaseDead(ctx)
}

// serve answers crustd's questions about the volumes: statistics, growth, freezing.
func serve(ctx context.Context, listener net.Listener, volumes *shim.Volumes) {
	err := rpc.ServeTTRPC(ctx, listener, slog.Default(), func(_ context.Context, _ rpc.Peer, server *ttrpc.Server) {
		volumes.Register(server)
	})
	if err != nil {
		slog.Error("socket for crustd", "err", err)
	}
}

// A shim whose guest runs crust-agent.
func Example() {
	_ = runPod
}
