package hostmount

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// What a group is given, as Kubernetes does (pkg/volume/volume_linux.go, changeFilePermission).
const (
	groupMode    = 0o660
	groupDirMode = 0o110
	// chunk is how many names of a directory are read at once.
	chunk = 1024
)

// GiveToGroup makes a mounted filesystem usable by a group: everything in it gets the group, read and write permission
// for owner and group, and directories also search permission and the set-group-id bit, so that what is made in them
// belongs to the group too. Symbolic links get the group and are never followed.
//
// Everything beneath a directory is changed before the directory, and the root last; only what differs is written. Where
// it is interrupted it goes on when called again, at the price of looking.
func GiveToGroup(ctx context.Context, dir string, gid int) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("group of %s: %w", dir, err)
	}
	defer root.Close()
	if err := giveTree(ctx, root, gid); err != nil {
		return fmt.Errorf("group of %s: %w", dir, err)
	}
	return nil
}

// giveTree changes what is in an open directory, and then the directory.
func giveTree(ctx context.Context, dir *os.Root, gid int) error {
	d, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		entries, err := d.ReadDir(chunk)
		for _, entry := range entries {
			if err := giveEntry(ctx, dir, entry, gid); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return give(dir, ".", gid)
		}
		if err != nil {
			return err
		}
	}
}

func giveEntry(ctx context.Context, dir *os.Root, entry fs.DirEntry, gid int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !entry.IsDir() {
		return gone(give(dir, entry.Name(), gid))
	}
	sub, err := dir.OpenRoot(entry.Name())
	if err != nil {
		return gone(err)
	}
	defer sub.Close()
	return giveTree(ctx, sub, gid)
}

// gone forgives that somebody else who uses the volume has removed a name since it was read.
func gone(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func give(dir *os.Root, name string, gid int) error {
	info, err := dir.Lstat(name)
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Gid) != gid {
		if err := dir.Lchown(name, -1, gid); err != nil {
			return err
		}
		// chown(2) takes set-user-id and set-group-id bits away; the mode is set below if it had any.
		if changed, err := dir.Lstat(name); err != nil {
			return err
		} else if changed.Mode() != info.Mode() {
			return chmod(dir, name, info.Mode(), true)
		}
	}
	return chmod(dir, name, info.Mode(), false)
}

func chmod(dir *os.Root, name string, mode fs.FileMode, always bool) error {
	if mode&os.ModeSymlink != 0 {
		return nil
	}
	want := mode | groupMode
	if mode.IsDir() {
		want |= groupDirMode | os.ModeSetgid
	}
	if want == mode && !always {
		return nil
	}
	return dir.Chmod(name, want)
}
