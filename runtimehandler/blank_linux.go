package runtimehandler

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// NeverWritten says whether an image file has no data at all: the file is one single hole (lseek(2), SEEK_DATA).
// Preallocated extents that were not written count as holes. For a block device the kernel cannot tell, and known is
// false.
func NeverWritten(path string) (blank, known bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false, false, fmt.Errorf("look for data: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false, false, fmt.Errorf("look for data: %w", err)
	}
	if !info.Mode().IsRegular() {
		return false, false, nil
	}
	_, err = unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return true, true, nil
	case err != nil:
		return false, false, fmt.Errorf("look for data in %s: %w", path, err)
	}
	return false, true, nil
}
