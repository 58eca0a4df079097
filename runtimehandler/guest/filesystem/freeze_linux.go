package filesystem

import (
	"errors"
	"fmt"
	"math"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Frozen is a filesystem that takes no writes until it is thawed.
type Frozen struct{ root *os.File }

// Freeze makes a mounted filesystem consistent on its device and holds back writes (FIFREEZE). It waits for writes under
// way. ErrFailedPrecondition if it is frozen already.
func Freeze(target string) (*Frozen, error) {
	root, err := os.Open(target)
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", target, err)
	}
	err = ioctl[int32](root.Fd(), fiFreeze, new(int32))
	if err == nil {
		return &Frozen{root: root}, nil
	}
	_ = root.Close()
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("it is frozen already: %w", errdefs.ErrFailedPrecondition)
	}
	return nil, fmt.Errorf("freeze %s: %w", target, err)
}

// Thaw ends the freeze, and may be called once.
func (f *Frozen) Thaw() error {
	err := ioctl[int32](f.root.Fd(), fiThaw, new(int32))
	if errors.Is(err, unix.EINVAL) {
		err = fmt.Errorf("it is not frozen any more: %w", errdefs.ErrFailedPrecondition)
	}
	if err = errors.Join(err, f.root.Close()); err != nil {
		return fmt.Errorf("thaw %s: %w", f.root.Name(), err)
	}
	return nil
}

// Trim tells the device which blocks the filesystem does not use (FITRIM), and returns how many bytes these are.
// ErrNotImplemented if the device cannot do anything with that.
func Trim(target string) (int64, error) {
	root, err := os.Open(target)
	if err != nil {
		return 0, fmt.Errorf("trim %s: %w", target, err)
	}
	defer root.Close()
	r := trimRange{length: math.MaxUint64}
	err = ioctl(root.Fd(), fiTrim, &r)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("the device cannot discard: %w", errdefs.ErrNotImplemented)
	}
	if err != nil {
		return 0, fmt.Errorf("trim %s: %w", target, err)
	}
	return int64(min(r.length, math.MaxInt64)), nil
}
