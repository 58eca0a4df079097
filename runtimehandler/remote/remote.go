// Package remote is the handler for every runtime whose shims register with the daemon: a shim asks for its volumes by
// itself (see package shim), so nothing has to be staged anywhere; what the daemon wants to know later, it asks the
// shim over ttrpc at the address with which that has registered.
//
// It keeps no state and no connection: either side may restart between two calls.
package remote

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// Name is the name of the handler.
const Name = "remote"

// defaultTimeout bounds a call whose caller set no deadline.
const defaultTimeout = 30 * time.Second

// Handler is a runtimehandler.Handler.
type Handler struct{}

var _ runtimehandler.Handler = Handler{}

// Name is constant.
func (Handler) Name() string { return Name }

// Capabilities is everything: what a single sandbox lacks, it says when it registers, and a claim is refused then.
func (Handler) Capabilities() runtimehandler.Capabilities {
	return runtimehandler.Capabilities{Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true, Freeze: true}
}

// Stage has nothing to do: a shim resolves its mounts itself.
func (Handler) Stage(context.Context, runtimehandler.Deferral) error { return nil }

// Unstage has nothing to do.
func (Handler) Unstage(context.Context, string) error { return nil }

// Sweep has nothing to do.
func (Handler) Sweep(context.Context, []runtimehandler.Deferral) ([]runtimehandler.Leftover, error) {
	return nil, nil
}

// Roots are none: shims say when they come, and their connections when they go.
func (Handler) Roots() []string { return nil }

// Status asks the sandbox to which the volume is bound. Without one nothing has claimed the volume.
func (Handler) Status(ctx context.Context, targetPath string, sandbox *runtimehandler.Sandbox) (runtimehandler.Status, error) {
	if sandbox == nil {
		return runtimehandler.Status{}, nil
	}
	var status runtimehandler.Status
	err := call(ctx, *sandbox, func(ctx context.Context, c runtimev1.TTRPCShimService) error {
		resp, err := c.GetSandbox(ctx, &runtimev1.GetSandboxRequest{})
		if err != nil {
			return err
		}
		for _, v := range resp.GetVolumes() {
			if v.GetTargetPath() == targetPath {
				status = runtimehandler.Status{Sandbox: sandbox, Mounted: v.GetMounted()}
			}
		}
		return nil
	})
	return status, err
}

// Stats asks the shim.
func (Handler) Stats(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox) (runtimehandler.Stats, error) {
	var stats runtimehandler.Stats
	err := call(ctx, sandbox, func(ctx context.Context, c runtimev1.TTRPCShimService) error {
		resp, err := c.GetVolumeStats(ctx, &runtimev1.GetVolumeStatsRequest{TargetPath: targetPath})
		if err != nil {
			return err
		}
		if stats, err = runtimehandler.StatsFromProto(resp.GetUsage(), resp.GetCondition()); err != nil {
			return fmt.Errorf("answer of the shim: %w: %w", err, errdefs.ErrUnavailable)
		}
		return nil
	})
	return stats, err
}

// Expand asks the shim.
func (Handler) Expand(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox, requiredBytes int64) (int64, error) {
	var size int64
	err := call(ctx, sandbox, func(ctx context.Context, c runtimev1.TTRPCShimService) error {
		resp, err := c.ExpandVolume(ctx, &runtimev1.ExpandVolumeRequest{TargetPath: targetPath, RequiredBytes: requiredBytes})
		if err != nil {
			return err
		}
		size = resp.GetDeviceBytes()
		if size < requiredBytes {
			return fmt.Errorf("the shim reports %d bytes, %d were required: %w", size, requiredBytes, errdefs.ErrUnavailable)
		}
		return nil
	})
	return size, err
}

// Freeze asks the shim.
func (Handler) Freeze(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox, limit time.Duration) error {
	return call(ctx, sandbox, func(ctx context.Context, c runtimev1.TTRPCShimService) error {
		_, err := c.FreezeVolume(ctx, &runtimev1.FreezeVolumeRequest{TargetPath: targetPath, TimeLimit: durationpb.New(limit)})
		return err
	})
}

// Thaw asks the shim.
func (Handler) Thaw(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox) error {
	return call(ctx, sandbox, func(ctx context.Context, c runtimev1.TTRPCShimService) error {
		_, err := c.ThawVolume(ctx, &runtimev1.ThawVolumeRequest{TargetPath: targetPath})
		return err
	})
}

// call makes one call over a connection of its own, and turns the shim's status into one of our kinds.
func call(ctx context.Context, sandbox runtimehandler.Sandbox, fn func(context.Context, runtimev1.TTRPCShimService) error) (err error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultTimeout)
		defer cancel()
	}
	client, err := rpc.DialTTRPC(ctx, sandbox.Address)
	if err != nil {
		return fmt.Errorf("shim of sandbox %s: %w", sandbox.ID, err)
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	if err := rpc.FromWire(fn(ctx, runtimev1.NewTTRPCShimClient(client))); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer in time: %w", errdefs.ErrUnavailable)
		}
		return fmt.Errorf("shim of sandbox %s: %w", sandbox.ID, err)
	}
	return nil
}
