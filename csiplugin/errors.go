package csiplugin

import (
	"fmt"

	"github.com/containerd/errdefs"
)

func invalid(format string, args ...any) error { return kind(errdefs.ErrInvalidArgument, format, args) }

func precondition(format string, args ...any) error {
	return kind(errdefs.ErrFailedPrecondition, format, args)
}

func outOfRange(format string, args ...any) error { return kind(errdefs.ErrOutOfRange, format, args) }

func alreadyExists(format string, args ...any) error {
	return kind(errdefs.ErrAlreadyExists, format, args)
}

func kind(kind error, format string, args []any) error {
	return fmt.Errorf(format+": %w", append(args, kind)...)
}
