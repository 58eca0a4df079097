package catalog

import (
	"errors"
	"fmt"
	"os"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/internal/diskfull"
)

// reserve is how many bytes beyond what it uses the file keeps allocated. A transaction takes about ten pages of 4 KiB
// and gives as many back to the next but one.
const reserve = 256 << 10

// noCopyOnWrite is FS_NOCOW_FL of linux/fs.h, chattr's +C.
const noCopyOnWrite = 0x00800000

// prepareFile makes the empty file for a new catalog. On btrfs it is marked to be overwritten in place: otherwise
// overwriting would need space that a full disk does not have. Elsewhere there is no such mark, and no such need.
func prepareFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return errors.Join(err, f.Close())
	}
	if fs.Type == unix.BTRFS_SUPER_MAGIC {
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, noCopyOnWrite); err != nil {
			return errors.Join(fmt.Errorf("mark %s as not copied on write: %w", path, err), f.Close())
		}
	}
	return f.Close()
}

// Reserve sees to it that the file has space for what it will be asked to write next. Call it before an operation that
// takes something, and not before one that gives something back: so the latter finds the space that the former left.
// ErrResourceExhausted on a full disk.
func (c *Catalog) Reserve() error {
	var used int64
	err := c.db.View(func(tx *bbolt.Tx) error { used = tx.Size(); return nil })
	if err != nil {
		return fmt.Errorf("catalog: %w", err)
	}
	f, err := os.OpenFile(c.db.Path(), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("catalog: %w", err)
	}
	// In whole steps, so that most calls find everything allocated; that is cheap to be told again.
	want := (used/reserve + 2) * reserve
	err = unix.Fallocate(int(f.Fd()), 0, 0, want)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("reserve space for the catalog: %w", diskfull.Kind(err))
	}
	return nil
}
