package hostmount

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	mount "k8s.io/mount-utils"
)

// Filesystem is a filesystem that is, or is to be, on a device.
type Filesystem struct {
	// Device node.
	Device string
	// Target is an existing directory.
	Target string
	// Type is "ext4" or "xfs".
	Type string
	// Flags are mount options of the user. They may be confidential and appear in no error.
	Flags    []string
	ReadOnly bool
}

// Probe returns what blkid finds on a device: the name of a filesystem or of a volume manager's or an encryption's
// signature, a text that says that there are partitions, or "" if it finds nothing that it knows. A device with several
// signatures is ErrFailedPrecondition.
func Probe(ctx context.Context, device string) (string, error) {
	found, err := formatter(ctx, false).GetDiskFormat(device)
	if err != nil {
		return "", fmt.Errorf("what is on %s cannot be told: %w", device, kindOf(ctx, err, errdefs.ErrFailedPrecondition))
	}
	return found, nil
}

// Format makes the filesystem and mounts it. The device must be known to be blank. Where blkid finds something after all,
// nothing is made.
func (f Filesystem) Format(ctx context.Context) error { return f.mount(ctx, true) }

// Mount checks the filesystem, unless it is read-only, and mounts it. It never makes one. A filesystem with damage that
// the check does not repair by itself is ErrFailedPrecondition.
func (f Filesystem) Mount(ctx context.Context) error { return f.mount(ctx, false) }

func (f Filesystem) mount(ctx context.Context, format bool) error {
	options, making := f.options()
	err := formatter(ctx, format).FormatAndMountSensitiveWithFormatOptions(f.Device, f.Target, f.Type, options, f.Flags, making)
	if err == nil {
		return nil
	}
	var kind error = errdefs.ErrInternal
	var failed mount.MountError
	if errors.As(err, &failed) && failed.Type == mount.HasFilesystemErrors {
		kind = errdefs.ErrFailedPrecondition
	}
	return fmt.Errorf("mount %s from %s at %s: %w", f.Type, f.Device, f.Target, kindOf(ctx, err, kind))
}

// options are those of the mount and of mkfs.
func (f Filesystem) options() (mounting, making []string) {
	switch f.Type {
	case "xfs":
		// A clone has the UUID of its source and must mount beside it.
		mounting = append(mounting, "nouuid")
		// Sectors of 4 KiB suit every device that the file may be behind later; smaller ones do not.
		making = append(making, "-s", "size=4096")
	case "ext4":
		making = append(making, "-b", "4096")
	}
	if f.ReadOnly {
		mounting = append(mounting, "ro")
	}
	return mounting, making
}

// Grow makes a mounted filesystem as large as its device. It is success if it is so already.
func (f Filesystem) Grow(ctx context.Context) error {
	if _, err := mount.NewResizeFs(tools{ctx: ctx}).Resize(f.Device, f.Target); err != nil {
		return fmt.Errorf("grow %s on %s: %w", f.Type, f.Device, kindOf(ctx, err, errdefs.ErrInternal))
	}
	return nil
}

// kindOf gives an error of mount-utils, which is text only, a kind: the context's, if that has ended.
func kindOf(ctx context.Context, err, kind error) error {
	if ctx.Err() != nil {
		kind = ctx.Err()
	}
	return fmt.Errorf("%v: %w", err, kind)
}

// forbidden are mount options that would make something else of a mount than a mount of its device. A name that ends in
// "=" or "." is a prefix.
var forbidden = []string{
	"bind", "rbind", "move", "remount", "beneath", "loop", "loop=", "offset=", "sizelimit=", "encryption=", "helper=", "uhelper=", "X-mount.",
	"shared", "rshared", "private", "rprivate", "slave", "rslave", "unbindable", "runbindable",
}

// maxFlags is how many bytes all mount flags may have (CSI, VolumeCapability.MountVolume.mount_flags).
const maxFlags = 4096

// CheckFlags reports ErrInvalidArgument for mount flags that may not be used. The text does not show them.
func CheckFlags(flags []string) error {
	total := 0
	for i, flag := range flags {
		total += len(flag)
		for option := range strings.SplitSeq(flag, ",") {
			name := option
			if k, _, ok := strings.Cut(option, "="); ok {
				name = k + "="
			}
			switch {
			case option == "":
				return fmt.Errorf("mount flag %d is empty, or has an empty part: %w", i, errdefs.ErrInvalidArgument)
			case slices.Contains(forbidden, name), strings.HasPrefix(option, "X-mount."):
				return fmt.Errorf("mount flag %q would change what is mounted: %w", strings.TrimSuffix(name, "="), errdefs.ErrInvalidArgument)
			}
		}
	}
	if total > maxFlags {
		return fmt.Errorf("the mount flags have %d bytes, %d are allowed: %w", total, maxFlags, errdefs.ErrInvalidArgument)
	}
	return nil
}

// AsksReadOnly reports whether mount flags ask for a read-only mount.
func AsksReadOnly(flags []string) bool {
	return slices.ContainsFunc(flags, func(flag string) bool { return hasOption(flag, "ro") })
}
