package extents

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// What x/sys/unix lacks, of linux/fiemap.h and linux/fs.h.
const (
	fsIocFiemap     = 0xC020660B // FS_IOC_FIEMAP
	fiemapFlagSync  = 0x0001     // FIEMAP_FLAG_SYNC
	extentLast      = 0x0001     // FIEMAP_EXTENT_LAST
	extentUnwritten = 0x0800     // FIEMAP_EXTENT_UNWRITTEN
	extentMerged    = 0x1000     // FIEMAP_EXTENT_MERGED
	extentShared    = 0x2000     // FIEMAP_EXTENT_SHARED

	// harmless are the flags that leave no doubt of where an extent's data is.
	harmless = extentLast | extentUnwritten | extentMerged | extentShared
)

// perCall is how many extents are asked for at a time, of 56 bytes each.
const perCall = 2048

// extent is struct fiemap_extent; offsets and lengths are in bytes.
type extent struct {
	Logical, Physical, Length uint64
	_                         [2]uint64
	Flags                     uint32
	_                         [3]uint32
}

// fiemap is struct fiemap with room for some extents.
type fiemap struct {
	Start, Length               uint64
	Flags, Mapped, Count, Spare uint32
	Extents                     [perCall]extent
}

// ask fills m with the extents of a file that have a byte in [from, to), from the first on and as many as there is room
// for, after the file's dirty data was written back.
func (m *fiemap) ask(f *os.File, from, to int64) ([]extent, error) {
	m.Start, m.Length = uint64(from), uint64(to-from)
	m.Flags, m.Mapped, m.Count = fiemapFlagSync, 0, perCall
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(m)))
		if errno == 0 {
			return m.Extents[:min(m.Mapped, perCall)], nil
		}
		if !errors.Is(errno, unix.EINTR) {
			return nil, fmt.Errorf("extent map of %s (FS_IOC_FIEMAP): %w", f.Name(), errno)
		}
	}
}

// each calls do with a file's extents that have a byte in [from, to), in order, as many at a time as the kernel returns, and
// with how far the map is known then, until do returns false. What lies between extents are holes. That no extent is left is
// known when the kernel returns none; which one it calls the last differs between filesystems.
func (m *fiemap) each(ctx context.Context, f *os.File, from, to int64, do func(found []extent, known int64) bool) error {
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		found, err := m.ask(f, from, to)
		if err != nil {
			return err
		}
		before := from
		for _, x := range found {
			if x.Length == 0 || x.Logical > math.MaxInt64 || x.Length > math.MaxInt64-x.Logical {
				return fmt.Errorf("extent map of %s: an extent of %d bytes at %d: %w", f.Name(), x.Length, x.Logical, errdefs.ErrDataLoss)
			}
			from = max(from, int64(x.Logical+x.Length))
		}
		if len(found) == 0 {
			return nil
		}
		if from == before {
			return fmt.Errorf("extent map of %s: it does not get beyond %d: %w", f.Name(), from, errdefs.ErrDataLoss)
		}
		if !do(found, from) {
			return nil
		}
	}
	return nil
}

// Usage is how a file lies on its filesystem.
type Usage struct {
	// Extents is how many pieces the kernel reports.
	Extents int64
	// Allocated and Shared are the bytes of all pieces, and of those that other files share.
	Allocated, Shared int64
}

// Measure walks a file's whole map, once.
func Measure(ctx context.Context, f *os.File) (Usage, error) {
	var u Usage
	err := new(fiemap).each(ctx, f, 0, math.MaxInt64, func(found []extent, _ int64) bool {
		for _, x := range found {
			u.Extents++
			u.Allocated += int64(x.Length)
			if x.Flags&extentShared != 0 {
				u.Shared += int64(x.Length)
			}
		}
		return true
	})
	return u, err
}
