package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/command"
)

// Finding is what is on a device, as far as that can be seen.
type Finding struct {
	// Type and Usage are libblkid's names of what the superblock says; empty if it recognises none.
	Type, Usage string
	// Table is libblkid's name of the partition table, if there is one.
	Table string
	// Ambivalent: there are signatures of more than one kind.
	Ambivalent bool
	// NonZero is where the first byte that is not zero was found; -1 if all that was read is zero.
	NonZero int64
	// Journal: an ext filesystem was not unmounted, and its journal has to be replayed.
	Journal bool
	// Bytes is the size of the device.
	Bytes int64
}

// Read looks at a device and changes nothing. A device that cannot be read is an error, never a finding of nothing
// (blkid(8) has the same exit code for both).
func Read(ctx context.Context, device string, bytes int64) (Finding, error) {
	f := Finding{NonZero: -1, Bytes: bytes}
	dev, err := os.Open(device)
	if err != nil {
		return f, fmt.Errorf("look at %s: %w", device, err)
	}
	defer dev.Close()
	if f.NonZero, err = firstNonZero(ctx, dev, bytes); err != nil {
		return f, fmt.Errorf("look at %s: %w", device, err)
	}
	// What was read may go out of the cache again: a formatted filesystem has no use for it.
	_ = unix.Fadvise(int(dev.Fd()), 0, 0, unix.FADV_DONTNEED)
	result, err := command.Run(ctx, "blkid", "-p", "-o", "export", device)
	if err != nil {
		return f, fmt.Errorf("look at %s: %w", device, err)
	}
	if err := f.parse(result); err != nil {
		return f, err
	}
	if strings.HasPrefix(f.Type, "ext") {
		if f.Journal, err = needsReplay(dev); err != nil {
			return f, fmt.Errorf("look at %s: %w", device, err)
		}
	}
	return f, nil
}

// The exit codes of blkid -p (blkid(8)).
const (
	blkidFound      = 0
	blkidNothing    = 2 // or the device could not be opened
	blkidAmbivalent = 8
)

// parse reads what blkid has answered.
func (f *Finding) parse(r command.Result) error {
	switch {
	case r.Code == blkidFound:
	case r.Code == blkidNothing && r.Stderr == "":
		return nil
	case r.Code == blkidAmbivalent:
		f.Ambivalent = true
		return nil
	default:
		return fmt.Errorf("it cannot be told what is on the device: %w", r.Failed())
	}
	for line := range strings.Lines(r.Stdout) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		switch key {
		case "TYPE":
			f.Type = value
		case "USAGE":
			f.Usage = value
		case "PTTYPE":
			f.Table = value
		}
	}
	if f.Type == "" && f.Table == "" {
		// It says that it has found something, so that it counts as something.
		f.Ambivalent = true
	}
	return nil
}

// The parts of an ext superblock that are of interest here (the kernel's Documentation/filesystems/ext4/super.rst).
const (
	extSuperblock      = 1024 // its offset on the device
	extBlocksLo        = 0x04
	extLogBlockSize    = 0x18
	extBlocksPerGroup  = 0x20
	extMagic           = 0x38
	extIncompat        = 0x60
	extBlocksHi        = 0x150
	extSuperblockBytes = 1024
	extMagicValue      = 0xef53
	extIncompatRecover = 0x4
	extIncompat64Bit   = 0x80
)

// readExtSuperblock returns the superblock of an ext filesystem as the kernel's cache has it.
func readExtSuperblock(dev io.ReaderAt) ([]byte, error) {
	sb := make([]byte, extSuperblockBytes)
	if _, err := dev.ReadAt(sb, extSuperblock); err != nil {
		return nil, fmt.Errorf("superblock: %w", err)
	}
	if binary.LittleEndian.Uint16(sb[extMagic:]) != extMagicValue {
		return nil, fmt.Errorf("no ext superblock: %w", errdefs.ErrDataLoss)
	}
	return sb, nil
}

func needsReplay(dev io.ReaderAt) (bool, error) {
	sb, err := readExtSuperblock(dev)
	if err != nil {
		return false, err
	}
	return binary.LittleEndian.Uint32(sb[extIncompat:])&extIncompatRecover != 0, nil
}

// region is a part of a device, in bytes.
type region struct{ start, length int64 }

const (
	mib = 1 << 20
	// readWhole is up to which size a device is read from end to end.
	readWhole = 64 * mib
	// sampleBytes is the size of a sample between the ends.
	sampleBytes = 64 << 10
	// samples is into how many equal parts a device is divided for samples at their borders; XFS's allocation groups
	// begin at its quarters.
	samples = 16
	// extGroup is the size of ext4's block groups with blocks of 4 KiB.
	extGroup = 128 * mib
	// btrfsMirror is where btrfs has its second superblock.
	btrfsMirror = 64 * mib
)

// extBackups are the first block groups with a copy of the superblock (sparse_super).
var extBackups = []int64{1, 3, 5, 7, 9, 25, 27, 49}

// regions returns where a device of a size is read to see whether it is blank: all of a small one; of a larger one both
// ends, where nearly all formats have their headers, the places of second copies, and samples between.
func regions(bytes int64) []region {
	if bytes <= readWhole {
		return []region{{0, bytes}}
	}
	list := []region{{0, 4 * mib}, {bytes - mib, mib}, {btrfsMirror, sampleBytes}}
	for _, group := range extBackups {
		list = append(list, region{group * extGroup, sampleBytes})
	}
	for i := range int64(samples - 1) {
		list = append(list, region{bytes / samples * (i + 1) &^ (sampleBytes - 1), sampleBytes})
	}
	var inside []region
	for _, r := range list {
		if r.start+r.length <= bytes {
			inside = append(inside, r)
		}
	}
	return inside
}

// firstNonZero returns the offset of a byte that is not zero, or -1 if none is in the regions of a device.
func firstNonZero(ctx context.Context, dev io.ReaderAt, bytes int64) (int64, error) {
	buf := make([]byte, mib)
	for _, r := range regions(bytes) {
		for done := int64(0); done < r.length; {
			if ctx.Err() != nil {
				return 0, context.Cause(ctx)
			}
			chunk := buf[:min(int64(len(buf)), r.length-done)]
			n, err := dev.ReadAt(chunk, r.start+done)
			if err != nil && !(errors.Is(err, io.EOF) && n == len(chunk)) {
				return 0, fmt.Errorf("read %d bytes at %d: %w", len(chunk), r.start+done, err)
			}
			if at := indexNonZero(chunk); at >= 0 {
				return r.start + done + int64(at), nil
			}
			done += int64(n)
		}
	}
	return -1, nil
}

// indexNonZero returns the index of the first byte that is not zero, or -1.
func indexNonZero(b []byte) int {
	i := 0
	for ; len(b)-i >= 8; i += 8 {
		if binary.NativeEndian.Uint64(b[i:]) != 0 {
			break
		}
	}
	for ; i < len(b); i++ {
		if b[i] != 0 {
			return i
		}
	}
	return -1
}
