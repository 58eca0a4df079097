package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu/qmp"
)

const (
	// detachTimeout bounds the steps of plugging out. The guest has to take part, and a slow one takes seconds.
	detachTimeout = 30 * time.Second
	// replugInterval is how often a guest that has not let go is asked again.
	replugInterval = 5 * time.Second
	// nodePoll is how often a node is removed that something in QEMU still uses for a moment.
	nodePoll = 20 * time.Millisecond
)

// DetachDisk plugs a disk out and returns when QEMU has closed its file. The guest must have unmounted it. A serial that is
// not attached succeeds, and so does everything once the VM has ended. ErrUnavailable if the guest has not let go of it in
// time; it then counts as still attached, and DetachDisk may be called again.
func (vm *VM) DetachDisk(ctx context.Context, serial string) error {
	ctx, cancel := context.WithTimeout(ctx, detachTimeout)
	defer cancel()
	d := vm.find(serial)
	if d == nil {
		return nil
	}
	defer d.mu.Unlock()
	if err := vm.unplug(ctx, d); err != nil {
		select {
		case <-vm.process.done: // nothing is plugged in any more
		default:
			return fmt.Errorf("detach disk %s: %w", serial, err)
		}
	}
	vm.release(d)
	return nil
}

// find returns the disk of a serial with its lock held, or nil.
func (vm *VM) find(serial string) *disk {
	vm.mu.Lock()
	d := vm.disks[serial]
	vm.mu.Unlock()
	if d == nil {
		return nil
	}
	d.mu.Lock()
	if d.gone {
		d.mu.Unlock()
		return nil
	}
	return d
}

// unplug takes back whatever plug has got done. Every step succeeds if there is nothing to do.
func (vm *VM) unplug(ctx context.Context, d *disk) error {
	if err := vm.removeDevice(ctx, d); err != nil {
		return err
	}
	if err := vm.removeNode(ctx, d); err != nil {
		return err
	}
	err := vm.monitor.Execute(ctx, "remove-fd", map[string]any{"fdset-id": d.fdset()}, nil)
	if _, refused := errors.AsType[*qmp.Error](err); refused {
		return nil // there is no such set
	}
	return err
}

// removeDevice asks the guest to let go of the device, and waits until it has.
func (vm *VM) removeDevice(ctx context.Context, d *disk) error {
	wait, cancel := vm.monitor.Expect(func(e qmp.Event) bool { return e.Name == "DEVICE_DELETED" && e.Field("device") == d.name() })
	defer cancel()
	for {
		err := vm.monitor.Execute(ctx, "device_del", map[string]any{"id": d.name()}, nil)
		if refused, ok := errors.AsType[*qmp.Error](err); ok {
			if refused.Class == "DeviceNotFound" {
				return nil
			}
			err = nil // it is being unplugged already
		}
		if err != nil {
			return err
		}
		waitCtx, cancelWait := context.WithTimeout(ctx, replugInterval)
		_, err = wait(waitCtx)
		cancelWait()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("the guest does not let go of it: %w", err)
		}
	}
}

// removeNode closes the file. The device that has used it may need a moment to end.
func (vm *VM) removeNode(ctx context.Context, d *disk) error {
	for {
		err := vm.monitor.Execute(ctx, "blockdev-del", map[string]any{"node-name": d.name()}, nil)
		if _, refused := errors.AsType[*qmp.Error](err); !refused {
			return err
		}
		there, listErr := vm.hasNode(ctx, d.name())
		if listErr != nil || !there {
			return listErr
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
		case <-time.After(nodePoll):
		}
	}
}

// blockInfo is what is used of QEMU's BlockDeviceInfo.
type blockInfo struct {
	Name  string `json:"node-name"`
	Image struct {
		Bytes int64 `json:"virtual-size"`
	} `json:"image"`
}

// nodes returns the block nodes.
func (vm *VM) nodes(ctx context.Context) ([]blockInfo, error) {
	var raw json.RawMessage
	if err := vm.monitor.Execute(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &raw); err != nil {
		return nil, err
	}
	var nodes []blockInfo
	if err := json.Unmarshal(raw, &nodes); err != nil {
		return nil, fmt.Errorf("list of block nodes: %w", err)
	}
	return nodes, nil
}

func (vm *VM) hasNode(ctx context.Context, name string) (bool, error) {
	nodes, err := vm.nodes(ctx)
	for _, n := range nodes {
		if n.Name == name {
			return true, nil
		}
	}
	return false, err
}
