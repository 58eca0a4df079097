// Package fileattr reads and sets what chattr(1) and xfs_io's chattr and extsize do: a file's flags and allocation hints
// (struct fsxattr of linux/fs.h, which x/sys/unix lacks).
package fileattr

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	fsIocGetXattr = 0x801C581F // FS_IOC_FSGETXATTR
	fsIocSetXattr = 0x401C5820 // FS_IOC_FSSETXATTR
)

// The flags that this project uses.
const (
	// Realtime says that the data is on the realtime device of an XFS (FS_XFLAG_REALTIME).
	Realtime = 0x00000001
	// Immutable says that nobody can open the file for writing, rename, link or remove it (FS_XFLAG_IMMUTABLE).
	Immutable = 0x00000008
	// ExtentSize says that ExtentSize is valid (FS_XFLAG_EXTSIZE).
	ExtentSize = 0x00000800
)

// Attributes is struct fsxattr. ExtentSize is in bytes.
type Attributes struct {
	Flags, ExtentSize, Extents, Project, CowExtentSize uint32
	_                                                  [8]byte
}

// Get reads a file's attributes.
func Get(f *os.File) (a Attributes, err error) {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocGetXattr, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return a, fmt.Errorf("attributes of %s (FS_IOC_FSGETXATTR): %w", f.Name(), errno)
	}
	return a, nil
}

// Set sets a file's attributes, those that Get has returned but for the changes. Immutable takes CAP_LINUX_IMMUTABLE
// (EPERM); the file may be open for reading only.
func Set(f *os.File, a Attributes) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocSetXattr, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return fmt.Errorf("attributes of %s (FS_IOC_FSSETXATTR): %w", f.Name(), errno)
	}
	return nil
}
