package reflink

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
)

// What x/sys/unix lacks, of linux/fiemap.h and linux/fs.h.
const (
	fsIocFiemap     = 0xC020660B // FS_IOC_FIEMAP
	fsIocGetXattr   = 0x801C581F // FS_IOC_FSGETXATTR
	fsIocSetXattr   = 0x401C5820 // FS_IOC_FSSETXATTR
	fiemapFlagSync  = 0x0001     // FIEMAP_FLAG_SYNC
	extentLast      = 0x0001     // FIEMAP_EXTENT_LAST
	extentShared    = 0x2000     // FIEMAP_EXTENT_SHARED
	flagExtentSize  = 0x0800     // FS_XFLAG_EXTSIZE
	extentSize      = 64 << 10   // see doc.go
	extentsPerAsked = 512
)

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
	Extents                     [extentsPerAsked]extent
}

// fsxattr is struct fsxattr.
type fsxattr struct {
	Flags, ExtentSize, Extents, Project, CowExtentSize uint32
	_                                                  [8]byte
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
		if errno == 0 {
			return nil
		}
		if !errors.Is(errno, unix.EINTR) {
			return errno
		}
	}
}

// hint asks the filesystem to allocate in pieces of extentSize. The file must be empty. Where there is no such hint
// nothing happens.
func (e *Engine) hint(f *os.File) error {
	if !e.hinted {
		return nil
	}
	var attr fsxattr
	if err := ioctl(f, fsIocGetXattr, unsafe.Pointer(&attr)); err != nil {
		return fmt.Errorf("FS_IOC_FSGETXATTR: %w", err)
	}
	attr.Flags |= flagExtentSize
	attr.ExtentSize = extentSize
	if err := ioctl(f, fsIocSetXattr, unsafe.Pointer(&attr)); err != nil {
		return fmt.Errorf("extent size hint (FS_IOC_FSSETXATTR): %w", err)
	}
	return nil
}

// eachExtent calls do with a file's extents in order, after its dirty data was written back.
func eachExtent(ctx context.Context, f *os.File, do func(extent)) error {
	m := fiemap{Length: math.MaxUint64, Flags: fiemapFlagSync, Count: extentsPerAsked}
	for {
		m.Mapped = 0
		if err := ioctl(f, fsIocFiemap, unsafe.Pointer(&m)); err != nil {
			return fmt.Errorf("FS_IOC_FIEMAP: %w", err)
		}
		for _, x := range m.Extents[:m.Mapped] {
			do(x)
			if x.Flags&extentLast != 0 {
				return nil
			}
			m.Start = x.Logical + x.Length
		}
		if m.Mapped == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		m.Length = math.MaxUint64 - m.Start
	}
}

// Extents asks for the extent map. What a filesystem reports in two pieces although they adjoin is two pieces.
func (e *Engine) Extents(ctx context.Context, name engine.Name) (engine.Extents, error) {
	f, err := e.open(name, os.O_RDONLY)
	if err != nil {
		return engine.Extents{}, err
	}
	defer f.Close()
	var found engine.Extents
	err = eachExtent(ctx, f, func(x extent) {
		found.Count++
		found.Allocated += int64(x.Length)
		if x.Flags&extentShared != 0 {
			found.Shared += int64(x.Length)
		}
	})
	if err != nil {
		return engine.Extents{}, fmt.Errorf("extents of object %s: %w", name, err)
	}
	return found, nil
}
