package filesystem

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/guest/command"
)

// MinExt4Bytes is the least size of a device for a new ext4 filesystem: on less, mkfs.ext4 makes one without a journal,
// which does not survive a crash.
const MinExt4Bytes = 16 << 20

// MinXFSBytes is the least size of a device for a new XFS filesystem: mkfs.xfs refuses less since xfsprogs 5.19
// (mkfs.xfs(8)).
const MinXFSBytes = 300 << 20

// kind is a type of filesystem that can be made, checked, mounted and grown.
type kind struct {
	name string
	// minBytes is the least size of a device on which it can be made, and why.
	minBytes int64
	minWhy   string
	// traces are what libblkid may take an unfinished mkfs of it for.
	traces []string
	// make returns the command line that makes it; over means that something may be on the device.
	make func(device string, over bool) []string
	// options are set at every mount unless the user sets the option of that name otherwise.
	options []string
	// tools must be in the guest.
	tools []string
}

// kinds are sorted by name.
var kinds = []kind{
	{
		name:     "ext4",
		minBytes: MinExt4Bytes,
		minWhy:   "on less it has no journal and does not survive a crash",
		traces:   []string{"ext2", "ext3", "ext4", "ext4dev"},
		make:     makeExt4,
		options:  []string{"errors=remount-ro"},
		tools:    []string{"mkfs.ext4", "e2fsck"},
	},
	{
		name:     "xfs",
		minBytes: MinXFSBytes,
		minWhy:   "mkfs.xfs makes none on less",
		traces:   []string{"xfs"},
		make:     makeXFS,
		options:  []string{"nouuid"}, // a clone mounts beside its source
		tools:    []string{"mkfs.xfs", "xfs_repair"},
	},
}

// makeExt4 leaves out two features of newer e2fsprogs that older kernels cannot mount, so that a volume can still move to
// them, and reserves nothing for root: a volume belongs to its pod.
func makeExt4(device string, over bool) []string {
	argv := []string{"mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-I", "256", "-O", "^metadata_csum_seed,^orphan_file"}
	if over {
		return append(argv, "-F", "-E", "nodiscard", device)
	}
	// The device reads as zeros, so there is nothing to write zeros over.
	return append(argv, "-E", "nodiscard,assume_storage_prezeroed=1", device)
}

func makeXFS(device string, over bool) []string {
	argv := []string{"mkfs.xfs", "-q", "-K"}
	if over {
		argv = append(argv, "-f")
	}
	return append(argv, device)
}

func kindOf(fsType string) (kind, error) {
	for _, k := range kinds {
		if k.name == fsType {
			return k, nil
		}
	}
	return kind{}, fmt.Errorf("filesystem type %q: want one of %v: %w", fsType, Types(), errdefs.ErrInvalidArgument)
}

// Types are the filesystem types that this package knows, sorted.
func Types() []string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

// Known says whether a filesystem type is one of [Types].
func Known(fsType string) bool { return slices.Contains(Types(), fsType) }

// HasTools says whether the guest has the programs for a filesystem type.
func HasTools(fsType string) bool {
	k, err := kindOf(fsType)
	return err == nil && !slices.ContainsFunc(k.tools, func(t string) bool { return !command.Exists(t) })
}
