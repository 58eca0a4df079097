package deferred

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/containerd/errdefs"
)

// Validate checks what an SP returned, by itself: required fields, clean absolute paths, a group that is a number. It
// does not look at the device. Errors are ErrInvalidArgument and name the field.
func (d *DeferredFilesystem) Validate() error {
	switch {
	case d == nil:
		return invalid("deferred_filesystem is missing")
	case d.GetDevice() == "":
		return invalid("deferred_filesystem.device is missing")
	case !filepath.IsAbs(d.GetDevice()) || filepath.Clean(d.GetDevice()) != d.GetDevice():
		return invalid("deferred_filesystem.device %q is not a clean absolute path", d.GetDevice())
	case d.GetFsType() == "":
		return invalid("deferred_filesystem.fs_type is missing")
	case d.GetSizeBytes() <= 0:
		return invalid("deferred_filesystem.size_bytes is %d", d.GetSizeBytes())
	case d.GetReadOnly() && d.GetFormatPolicy() == FormatPolicy_FORMAT_POLICY_IF_BLANK:
		return invalid("deferred_filesystem is read-only and yet to be formatted")
	}
	return ValidateGroup(d.GetSupplementalGroup(), d.GetSupplementalGroupChangePolicy())
}

// ValidateGroup checks a supplemental group and its change policy. Both may be empty; a policy without a group may
// not be. Errors are ErrInvalidArgument.
func ValidateGroup(group, policy string) error {
	if group != "" {
		// The largest id is reserved: chown(2) reads it as "leave it alone".
		if id, err := strconv.ParseUint(group, 10, 32); err != nil || id == 1<<32-1 {
			return invalid("supplemental group %q is not a group id", group)
		}
	}
	switch policy {
	case "":
	case GroupChangeAlways, GroupChangeOnRootMismatch:
		if group == "" {
			return invalid("supplemental group change policy %q without a supplemental group", policy)
		}
	default:
		return invalid("supplemental group change policy %q: want %s or %s", policy, GroupChangeAlways, GroupChangeOnRootMismatch)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}
