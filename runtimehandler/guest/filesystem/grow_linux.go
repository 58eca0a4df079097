package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// xfsMinAG is the least size of an allocation group in blocks (XFS_MIN_AG_BLOCKS): the kernel makes no smaller one.
const xfsMinAG = 64

// Grow makes a mounted filesystem as large as its device, and says whether it was smaller. It never makes it smaller.
// What is left at the end, too small for another group, stays unused, as the filesystems have it.
func Grow(target, device, fsType string, deviceBytes int64) (bool, error) {
	root, err := os.Open(target)
	if err != nil {
		return false, fmt.Errorf("grow %s: %w", target, err)
	}
	defer root.Close()
	grow := growXFS
	if fsType == "ext4" {
		grow = func(root *os.File, deviceBytes int64) (bool, error) { return growExt4(root, device, deviceBytes) }
	}
	grown, err := grow(root, deviceBytes)
	if errors.Is(err, unix.EROFS) {
		err = fmt.Errorf("%w: it is mounted read-only: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return false, fmt.Errorf("grow %s: %w", target, err)
	}
	return grown, nil
}

// ext4Size is the extent of an ext4 filesystem.
type ext4Size struct{ blocks, blockBytes, groupBlocks uint64 }

func readExt4Size(device string) (ext4Size, error) {
	dev, err := os.Open(device)
	if err != nil {
		return ext4Size{}, err
	}
	defer dev.Close()
	sb, err := readExtSuperblock(dev)
	if err != nil {
		return ext4Size{}, err
	}
	s := ext4Size{
		blocks:      uint64(binary.LittleEndian.Uint32(sb[extBlocksLo:])),
		blockBytes:  1024 << binary.LittleEndian.Uint32(sb[extLogBlockSize:]),
		groupBlocks: uint64(binary.LittleEndian.Uint32(sb[extBlocksPerGroup:])),
	}
	if binary.LittleEndian.Uint32(sb[extIncompat:])&extIncompat64Bit != 0 {
		s.blocks |= uint64(binary.LittleEndian.Uint32(sb[extBlocksHi:])) << 32
	}
	if s.blockBytes < 1024 || s.blockBytes > 64<<10 {
		return ext4Size{}, fmt.Errorf("superblock has a block size of %d: %w", s.blockBytes, errdefs.ErrDataLoss)
	}
	return s, nil
}

func growExt4(root *os.File, device string, deviceBytes int64) (bool, error) {
	before, err := readExt4Size(device)
	if err != nil {
		return false, err
	}
	want := uint64(deviceBytes) / before.blockBytes
	if want <= before.blocks {
		return false, nil
	}
	if err := ioctl(root.Fd(), ext4Resize, &want); err != nil {
		return false, fmt.Errorf("EXT4_IOC_RESIZE_FS from %d to %d blocks: %w", before.blocks, want, err)
	}
	after, err := readExt4Size(device)
	if err != nil {
		return false, err
	}
	// The kernel leaves out a last group in which there would be no room for data.
	if after.blocks+after.groupBlocks <= want {
		return false, fmt.Errorf("the kernel has grown it to %d blocks instead of %d: %w", after.blocks, want, errdefs.ErrInternal)
	}
	return after.blocks > before.blocks, nil
}

func growXFS(root *os.File, deviceBytes int64) (bool, error) {
	var before, after xfsGeometry
	if err := ioctl(root.Fd(), xfsGeometryV1, &before); err != nil {
		return false, fmt.Errorf("XFS_IOC_FSGEOMETRY: %w", err)
	}
	want := xfsBlocks(uint64(deviceBytes)/uint64(before.blockSize), uint64(before.agBlocks))
	if want <= before.dataBlocks {
		return false, nil
	}
	if err := ioctl(root.Fd(), xfsGrowData, &xfsGrow{newBlocks: want, imaxPct: before.imaxPct}); err != nil {
		return false, fmt.Errorf("XFS_IOC_FSGROWFSDATA from %d to %d blocks: %w", before.dataBlocks, want, err)
	}
	if err := ioctl(root.Fd(), xfsGeometryV1, &after); err != nil {
		return false, fmt.Errorf("XFS_IOC_FSGEOMETRY: %w", err)
	}
	if after.dataBlocks < want {
		return false, fmt.Errorf("the kernel has grown it to %d blocks instead of %d: %w", after.dataBlocks, want, errdefs.ErrInternal)
	}
	return true, nil
}

// xfsBlocks is how many of the device's blocks a filesystem can use: a last allocation group that would be too small is
// left out.
func xfsBlocks(deviceBlocks, agBlocks uint64) uint64 {
	if rest := deviceBlocks % agBlocks; rest < xfsMinAG {
		return deviceBlocks - rest
	}
	return deviceBlocks
}
