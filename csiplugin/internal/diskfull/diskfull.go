// Package diskfull tells a full disk apart from every other I/O error.
package diskfull

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Kind adds ErrResourceExhausted to an error that says that a filesystem or a quota is full. Other errors, and nil, come
// back unchanged.
func Kind(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrResourceExhausted)
	}
	return err
}
