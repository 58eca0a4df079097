package qemu

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// maxSerial is the size of a virtio-blk serial in bytes (VIRTIO_BLK_ID_BYTES; virtio 1.2, section 5.2.6).
	maxSerial = 20
	// sectorBytes is the unit of a virtio-blk device's size, whatever its block size (virtio 1.2, section 5.2.4).
	sectorBytes = 512
	// fileBlock is the unit of direct I/O to an image file that QEMU falls back to, of which the file's size has to be a
	// multiple, and the physical block size that a guest sees: that of nearly all filesystems beneath, so that a
	// filesystem in the guest does not write parts of blocks. All in bytes.
	fileBlock = 4096
)

// Disk is a disk to plug in.
type Disk struct {
	// Serial is under which the guest finds it: 1 to 20 letters, digits, '.', '_' and '-', unique in the VM.
	Serial string
	// Path is a block device or a raw image file: absolute, clean, and without symbolic links, which are not followed
	// because whoever could change one could have another device opened.
	Path string
	// ReadOnly has every write of the guest fail.
	ReadOnly bool
}

func (d Disk) validate() error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("disk %q: "+format+": %w", append(append([]any{d.Serial}, args...), errdefs.ErrInvalidArgument)...)
	}
	odd := func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
	}
	switch {
	case d.Serial == "" || len(d.Serial) > maxSerial || strings.ContainsFunc(d.Serial, odd):
		return fail("want a serial of 1 to %d letters, digits, '.', '_' and '-'", maxSerial)
	case !filepath.IsAbs(d.Path) || filepath.Clean(d.Path) != d.Path || strings.ContainsRune(d.Path, 0):
		return fail("path %q: want an absolute and clean one", d.Path)
	}
	return nil
}

// source is an open block device or image file.
type source struct {
	// file has the access and the flags that QEMU needs.
	file *os.File
	// path keeps the same file open without any access, and without a share in QEMU's locks on it.
	path              *os.File
	block             bool // a block device
	size              int64
	logical, physical int // block sizes in bytes
}

// openSource opens what is behind a disk, and checks that a guest can use it. ErrInvalidArgument if it never can,
// ErrFailedPrecondition if something has to change first; the text says what.
func openSource(d Disk) (_ *source, err error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, d.Path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("disk %s: %s has a symbolic link in it; resolve it first: %w", d.Serial, d.Path, errdefs.ErrInvalidArgument)
	case errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("disk %s: %s does not exist: %w", d.Serial, d.Path, errdefs.ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("disk %s: open %s: %w", d.Serial, d.Path, err)
	}
	s := &source{path: os.NewFile(uintptr(fd), d.Path), logical: sectorBytes, physical: fileBlock}
	defer func() {
		if err != nil {
			s.close()
			err = fmt.Errorf("disk %s: %s: %w", d.Serial, d.Path, err)
		}
	}()
	info, err := s.path.Stat()
	if err != nil {
		return nil, err
	}
	switch mode := info.Mode(); {
	case mode.IsRegular():
	case mode.Type() == os.ModeDevice:
		s.block = true
	default:
		return nil, fmt.Errorf("it is neither a block device nor a regular file: %w", errdefs.ErrInvalidArgument)
	}
	return s, s.open(d.ReadOnly)
}

// open opens the file for QEMU, past the host's page cache: what a guest has flushed must be on the disk, and the same
// data twice in memory helps nobody.
func (s *source) open(readOnly bool) error {
	flags := os.O_RDWR | unix.O_DIRECT
	if readOnly {
		flags = os.O_RDONLY | unix.O_DIRECT
	}
	var err error
	if s.file, err = s.reopen(flags); errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("its filesystem has no direct I/O (O_DIRECT); move the pool to XFS, ext4 or btrfs: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	if s.size, err = s.present(); err != nil {
		return err
	}
	if s.size == 0 || s.size%s.unit() != 0 {
		return fmt.Errorf("its size of %d bytes is zero, or not a multiple of %d: %w", s.size, s.unit(), errdefs.ErrInvalidArgument)
	}
	if !s.block {
		return nil
	}
	if s.logical, err = unix.IoctlGetInt(int(s.file.Fd()), unix.BLKSSZGET); err != nil {
		return fmt.Errorf("block size: %w", err)
	}
	physical, err := unix.IoctlGetInt(int(s.file.Fd()), unix.BLKPBSZGET)
	if err != nil {
		return fmt.Errorf("block size: %w", err)
	}
	s.physical = max(physical, s.logical)
	return nil
}

// unit is what the size has to be a multiple of.
func (s *source) unit() int64 {
	if s.block {
		return sectorBytes
	}
	return fileBlock
}

// reopen opens the same file once more, whatever its path means by now.
func (s *source) reopen(flags int) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", s.path.Fd()), flags, 0)
}

// present returns the file's size in bytes as it is now.
func (s *source) present() (int64, error) {
	if !s.block {
		info, err := s.path.Stat()
		if err != nil {
			return 0, err
		}
		return info.Size(), nil
	}
	f, err := s.reopen(os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return f.Seek(0, io.SeekEnd)
}

// handedOver closes what only QEMU needs.
func (s *source) handedOver() {
	if s.file != nil {
		_ = s.file.Close()
		s.file = nil
	}
}

func (s *source) close() {
	s.handedOver()
	_ = s.path.Close()
}
