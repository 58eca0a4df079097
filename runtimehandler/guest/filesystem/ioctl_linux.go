package filesystem

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The requests of ioctl(2) that package unix lacks: include/uapi/linux/fs.h, fs/ext4/ext4.h (which is not exported) and
// fs/xfs/libxfs/xfs_fs.h of the kernel.
const (
	fiFreeze      = 0xc0045877 // FIFREEZE
	fiThaw        = 0xc0045878 // FITHAW
	fiTrim        = 0xc0185879 // FITRIM
	ext4Resize    = 0x40086610 // EXT4_IOC_RESIZE_FS
	xfsGeometryV1 = 0x80705864 // XFS_IOC_FSGEOMETRY_V1
	xfsGrowData   = 0x4010586e // XFS_IOC_FSGROWFSDATA
)

// trimRange is struct fstrim_range, in bytes, from the beginning of the filesystem. The kernel answers in length how much
// was discarded.
type trimRange struct {
	_      uint64 // start
	length uint64
	_      uint64 // minlen
}

// xfsGeometry is struct xfs_fsop_geom_v1, as far as it is of interest.
type xfsGeometry struct {
	blockSize  uint32
	_          uint32 // rtextsize
	agBlocks   uint32
	_          [4]uint32 // agcount, logblocks, sectsize, inodesize
	imaxPct    uint32
	dataBlocks uint64
	_          [72]byte // the realtime device, the log, the UUID, features
}

// xfsGrow is struct xfs_growfs_data.
type xfsGrow struct {
	newBlocks uint64
	imaxPct   uint32
	_         uint32
}

// ioctl passes a pointer to a value that the kernel reads or writes.
func ioctl[T any](fd uintptr, request uint, value *T) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(request), uintptr(unsafe.Pointer(value)))
	if errno != 0 {
		return errno
	}
	return nil
}
