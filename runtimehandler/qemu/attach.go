package qemu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu/qmp"
)

const (
	// attachTimeout bounds the steps of plugging in.
	attachTimeout = 30 * time.Second
	// undoTimeout bounds the steps back after a failure, which may well be that QEMU does not answer.
	undoTimeout = 5 * time.Second
)

// disk is a disk that is plugged in, or may be.
type disk struct {
	Disk
	mu     sync.Mutex // held while it is plugged in, out, or resized
	source *source
	number int // makes its names in QEMU unique for the VM's life
	port   int
	gone   bool // plugged out, or never plugged in; whoever waited for mu looks again
	ready  bool // plugged in
}

// name is that of the block node and of the device.
func (d *disk) name() string { return fmt.Sprintf("disk%d", d.number) }

// fdset is the number of the set of file descriptors through which QEMU has the file.
func (d *disk) fdset() int { return d.number }

// AttachDisk plugs a disk in. The guest sees it a moment later; its agent waits for it. The same disk again succeeds;
// another one with the serial of one that is there is ErrAlreadyExists, ErrResourceExhausted if all ports are taken.
// ErrFailedPrecondition if the device is in use by another VM. If it fails half-way, and cannot be undone either, the disk
// counts as attached until DetachDisk succeeds.
func (vm *VM) AttachDisk(ctx context.Context, want Disk) error {
	if err := want.validate(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	d, err := vm.claim(want)
	if err != nil {
		return err
	}
	defer d.mu.Unlock()
	switch {
	case d.Disk != want:
		return fmt.Errorf("disk %s is attached as %s (read-only: %t): %w", d.Serial, d.Path, d.ReadOnly, errdefs.ErrAlreadyExists)
	case d.ready:
		return nil
	case d.source != nil:
		return fmt.Errorf("disk %s was attached in part; detach it first: %w", d.Serial, errdefs.ErrFailedPrecondition)
	}
	if d.source, err = openSource(want); err != nil {
		vm.release(d)
		return err
	}
	if err := vm.plug(ctx, d); err != nil {
		undoCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		if undo := vm.unplug(undoCtx, d); undo != nil {
			return errors.Join(fmt.Errorf("attach disk %s: %w", d.Serial, err), fmt.Errorf("undo: %w", undo))
		}
		vm.release(d)
		return fmt.Errorf("attach disk %s: %w", d.Serial, err)
	}
	d.ready = true
	return nil
}

// claim returns the disk of a serial, with its lock held; a new one gets a port.
func (vm *VM) claim(want Disk) (*disk, error) {
	for {
		vm.mu.Lock()
		d := vm.disks[want.Serial]
		if d == nil {
			var err error
			d, err = vm.newDisk(want)
			vm.mu.Unlock()
			return d, err
		}
		vm.mu.Unlock()
		d.mu.Lock()
		if !d.gone {
			return d, nil
		}
		d.mu.Unlock()
	}
}

// newDisk gives a disk a port; its lock is held. vm.mu is held.
func (vm *VM) newDisk(want Disk) (*disk, error) {
	select {
	case <-vm.process.done:
		return nil, fmt.Errorf("attach disk %s: the vm has ended: %w", want.Serial, errdefs.ErrUnavailable)
	default:
	}
	for port, used := range vm.ports {
		if used {
			continue
		}
		vm.ports[port] = true
		vm.last++
		d := &disk{Disk: want, number: vm.last, port: port}
		d.mu.Lock()
		vm.disks[want.Serial] = d
		return d, nil
	}
	return nil, fmt.Errorf("attach disk %s: all %d ports for disks are taken; detach one: %w", want.Serial, MaxDisks, errdefs.ErrResourceExhausted)
}

// release forgets a disk that is not plugged in; its lock is held.
func (vm *VM) release(d *disk) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	if d.source != nil {
		d.source.close()
	}
	d.gone, d.ready, d.source = true, false, nil
	vm.ports[d.port] = false
	delete(vm.disks, d.Serial)
}

// closeDisks lets go of all files when QEMU has ended.
func (vm *VM) closeDisks() {
	vm.mu.Lock()
	disks := make([]*disk, 0, len(vm.disks))
	for _, d := range vm.disks {
		disks = append(disks, d)
	}
	vm.mu.Unlock()
	for _, d := range disks {
		d.mu.Lock()
		if !d.gone {
			vm.release(d)
		}
		d.mu.Unlock()
	}
}

// plug hands the file to QEMU, makes a block node of it, and a device of that.
func (vm *VM) plug(ctx context.Context, d *disk) error {
	fd := map[string]any{"fdset-id": d.fdset()}
	if err := vm.monitor.ExecuteWithFile(ctx, "add-fd", fd, nil, d.source.file); err != nil {
		return err
	}
	// Our descriptor is the same open file as QEMU's, locks included.
	d.source.handedOver()
	if err := vm.monitor.Execute(ctx, "blockdev-add", blockNode(d), nil); err != nil {
		return lockError(err)
	}
	return lockError(vm.monitor.Execute(ctx, "device_add", diskDevice(d), nil))
}

// blockNode is how QEMU reads and writes the file: past the host's cache (a flush of the guest still flushes the host's
// disk, because no-flush is off), with Linux AIO, which unlike io_uring is there under every seccomp policy, with discard
// punching holes, and locked against another QEMU.
func blockNode(d *disk) map[string]any {
	driver := "file"
	if d.source.block {
		driver = "host_device"
	}
	cache := map[string]any{"direct": true, "no-flush": false}
	return map[string]any{
		"driver": "raw", "node-name": d.name(), "read-only": d.ReadOnly, "discard": "unmap", "cache": cache,
		"file": map[string]any{
			"driver": driver, "filename": fmt.Sprintf("/dev/fdset/%d", d.fdset()), "read-only": d.ReadOnly,
			"aio": "native", "locking": "on", "discard": "unmap", "cache": cache,
		},
	}
}

// diskDevice is what the guest sees. Errors are reported to it and do not stop the VM (the default for a full disk), for
// nobody would let it go on: the guest's filesystem deals with an error, and says so in its health.
func diskDevice(d *disk) map[string]any {
	return map[string]any{
		"driver": "virtio-blk-pci", "id": d.name(), "drive": d.name(), "bus": portID(d.port), "serial": d.Serial,
		"disable-legacy": "on", "iothread": diskThreadID, "num-queues": 1, "queue-size": 64, "write-cache": "on", "werror": "report", "rerror": "report",
		"logical_block_size": d.source.logical, "physical_block_size": d.source.physical,
	}
}

// lockError recognises that another QEMU, or this one for another disk, has the file. The node takes the locks that the
// device wants, so that either command may fail. QEMU has no error class for it.
func lockError(err error) error {
	if refused, ok := errors.AsType[*qmp.Error](err); ok && strings.Contains(refused.Desc, "lock") {
		return fmt.Errorf("%w: the device is in use elsewhere; detach it there first: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}
