package qemu

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
)

const (
	// shutdownTimeout bounds the guest's own shutdown, in which it writes everything to its disks and unmounts them.
	shutdownTimeout = 20 * time.Second
	// powerOffTimeout is how long the guest may take from its last word to being off.
	powerOffTimeout = 10 * time.Second
	// quitTimeout is how long QEMU may take to end when it is told to.
	quitTimeout = 3 * time.Second
)

// Stop ends the VM: the guest shuts down, or else QEMU quits, or else it is killed. The VM has ended when Stop returns,
// whatever it returns; an error says that the guest did not shut down by itself, so that what was not synced is lost. A
// VM that has ended is stopped.
func (vm *VM) Stop(ctx context.Context) error {
	err := vm.shutDown(ctx)
	if err == nil {
		return nil
	}
	quitCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quitTimeout)
	defer cancel()
	if vm.monitor.Execute(quitCtx, "quit", nil, nil) == nil {
		select {
		case <-vm.ended:
		case <-quitCtx.Done():
		}
	}
	vm.Kill()
	return fmt.Errorf("vm was stopped without its guest's help: %w", err)
}

func (vm *VM) shutDown(ctx context.Context) error {
	select {
	case <-vm.ended:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	if _, err := vm.agent.Shutdown(ctx, &guestv1.ShutdownRequest{}); err != nil {
		return rpc.FromWire(err)
	}
	_ = vm.client.Close() // that is what the guest waits for
	select {
	case <-vm.ended:
		return nil
	case <-time.After(powerOffTimeout):
		return fmt.Errorf("the guest has shut down and not powered off: %w", errdefs.ErrUnavailable)
	case <-ctx.Done():
		return fmt.Errorf("the guest has shut down and not powered off: %w", context.Cause(ctx))
	}
}

// Kill ends the VM at once, as a power failure would, and waits until nothing of it is left.
func (vm *VM) Kill() {
	vm.process.kill()
	<-vm.ended
	if vm.client != nil {
		_ = vm.client.Close()
	}
}
