package assist

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Found is what the superblock of a filesystem says. The zero value is for a device on which none is recognised.
type Found struct {
	FSType string
	Bytes  int64 // the filesystem's size
	Errors bool  // the kernel has noted errors in it that nobody has repaired
}

// slack is how much smaller than its device a filesystem may be that cannot grow any more, in bytes: ext4 leaves out a last
// group that is too small for its own tables, XFS one of less than 64 blocks.
const slack = 16 << 20

// Smaller says whether a filesystem was recognised that can grow on a device of size bytes.
func (f Found) Smaller(size int64) bool { return f.Bytes > 0 && f.Bytes < size-slack }

// The parts of superblocks that are of interest: the kernel's Documentation/filesystems/ext4/super.rst, and
// fs/xfs/libxfs/xfs_format.h (big endian).
const (
	extAt           = 1024
	extBlocks       = 0x04
	extLogBlockSize = 0x18
	extMagic        = 0x38
	extState        = 0x3a
	extIncompat     = 0x60
	extBlocksHigh   = 0x150
	extMagicValue   = 0xef53
	extStateErrors  = 0x2
	extIs64Bit      = 0x80

	xfsMagicValue = "XFSB"
	xfsBlockSize  = 4
	xfsBlocks     = 8

	superblockBytes = 2048
)

// Look reads the superblock at the beginning of a block device or image file. It changes nothing. Numbers that make no sense
// count as no filesystem: whoever mounts it will say what is wrong.
func Look(device string) (Found, error) {
	f, err := open(device, os.O_RDONLY)
	if err != nil {
		return Found{}, err
	}
	defer f.Close()
	raw := make([]byte, superblockBytes)
	if _, err := f.ReadAt(raw, 0); err != nil {
		if errors.Is(err, io.EOF) {
			return Found{}, nil
		}
		return Found{}, fmt.Errorf("look at %s: %w", device, err)
	}
	return parse(raw), nil
}

// parse reads the first superblockBytes of a device.
func parse(raw []byte) Found {
	if string(raw[:len(xfsMagicValue)]) == xfsMagicValue {
		return sized(Found{FSType: "xfs"}, binary.BigEndian.Uint64(raw[xfsBlocks:]), uint64(binary.BigEndian.Uint32(raw[xfsBlockSize:])))
	}
	sb := raw[extAt:]
	if binary.LittleEndian.Uint16(sb[extMagic:]) != extMagicValue {
		return Found{}
	}
	blocks := uint64(binary.LittleEndian.Uint32(sb[extBlocks:]))
	if binary.LittleEndian.Uint32(sb[extIncompat:])&extIs64Bit != 0 {
		blocks |= uint64(binary.LittleEndian.Uint32(sb[extBlocksHigh:])) << 32
	}
	log := binary.LittleEndian.Uint32(sb[extLogBlockSize:])
	if log > 6 {
		return Found{}
	}
	return sized(Found{FSType: "ext4", Errors: binary.LittleEndian.Uint16(sb[extState:])&extStateErrors != 0}, blocks, 1024<<log)
}

// sized completes what was found, if the numbers can be those of a filesystem: blocks of 512 bytes to 64 KiB, and no more
// than a file can have.
func sized(f Found, blocks, blockBytes uint64) Found {
	if blockBytes < 512 || blockBytes > 64<<10 || blockBytes&(blockBytes-1) != 0 || blocks > (1<<62)/blockBytes {
		return Found{}
	}
	f.Bytes = int64(blocks * blockBytes)
	return f
}

// Size returns the size in bytes of a block device or image file.
func Size(device string) (int64, error) {
	f, err := open(device, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, fmt.Errorf("size of %s: %w", device, err)
	}
	return size, nil
}

// open opens a block device or image file, and nothing else. It does not wait for the other end of a FIFO.
func open(device string, flags int) (*os.File, error) {
	f, err := os.OpenFile(device, flags|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("device: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() && info.Mode().Type() != os.ModeDevice {
		err = fmt.Errorf("device %s is neither a block device nor an image file: %w", device, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
