package filesystem

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/guest/command"
)

// The exit codes of e2fsck (e2fsck(8)), which add up.
const (
	fsckCorrected   = 1 // errors were corrected
	fsckReboot      = 2 // the same, and a mounted filesystem should be mounted anew; ours is not mounted
	fsckUncorrected = 4 // errors are left
)

// Check replays the journal of an ext4 filesystem and repairs what can be repaired without asking (e2fsck -p). XFS does
// its part when it is mounted, so it is not checked here. ErrDataLoss if a person has to repair it.
func Check(ctx context.Context, device, fsType string) (checked, repaired bool, err error) {
	if fsType != "ext4" {
		return false, false, nil
	}
	result, err := command.Run(ctx, "e2fsck", "-p", device)
	if err != nil {
		return false, false, err
	}
	switch {
	case result.Code&^(fsckCorrected|fsckReboot) == 0:
		return true, result.Code != 0, nil
	case result.Code&fsckUncorrected != 0:
		return true, false, fmt.Errorf("the filesystem is damaged beyond what is repaired without asking; restore a backup, or take a copy of the device and run e2fsck -fy on it: %w: %w",
			result.Failed(), errdefs.ErrDataLoss)
	}
	return false, false, result.Failed()
}

// Sound says whether a full check finds a whole filesystem. It is for one that may be unfinished, and has no data; ext4's
// journal is replayed on the way.
func Sound(ctx context.Context, device, fsType string) (bool, error) {
	argv := []string{"xfs_repair", "-n", device} // finds the mark of an unfinished mkfs, too
	if fsType == "ext4" {
		argv = []string{"e2fsck", "-f", "-p", device}
	}
	result, err := command.Run(ctx, argv...)
	if err != nil {
		return false, err
	}
	if fsType == "ext4" {
		return result.Code&^(fsckCorrected|fsckReboot) == 0, nil
	}
	return result.Code == 0, nil
}

// diagnose says what is wrong with an XFS filesystem that did not mount; it changes nothing.
func diagnose(ctx context.Context, device string) string {
	result, err := command.Run(ctx, "xfs_repair", "-n", device)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("xfs_repair -n: exit code %d: %s", result.Code, result.Tail)
}
