package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"

	"crust.dev/crust/runtimehandler/guest/command"
)

// wipeBytes at each end of a device have the signatures of nearly all formats.
const wipeBytes = mib

// Make makes a filesystem and waits until it is on the device. over says that an interrupted mkfs may have left
// something: signatures at both ends are wiped first, and nothing is taken for zero. A crash or an end of ctx in the
// middle leaves an unfinished filesystem.
func Make(ctx context.Context, device, fsType string, over bool) error {
	k, err := kindOf(fsType)
	if err != nil {
		return err
	}
	if over {
		if err := wipeEnds(device); err != nil {
			return fmt.Errorf("wipe %s: %w", device, err)
		}
	}
	result, err := command.Run(ctx, k.make(device, over)...)
	if err != nil {
		return err
	}
	if result.Code != 0 {
		return result.Failed()
	}
	return syncDevice(device)
}

func wipeEnds(device string) (err error) {
	// O_EXCL: not while a filesystem on it is mounted.
	dev, err := os.OpenFile(device, os.O_RDWR|os.O_EXCL, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	size, err := dev.Seek(0, 2)
	if err != nil {
		return err
	}
	zeros := make([]byte, min(wipeBytes, size))
	for _, at := range []int64{0, size - int64(len(zeros))} {
		if _, err := dev.WriteAt(zeros, at); err != nil {
			return err
		}
	}
	return dev.Sync()
}

// syncDevice writes the device's cached blocks and makes it flush its own cache.
func syncDevice(device string) error {
	dev, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(dev.Sync(), dev.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", device, err)
	}
	return nil
}
