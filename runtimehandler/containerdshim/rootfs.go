package containerdshim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
)

const (
	// maxCopied bounds one mount that is copied into a root filesystem, in bytes: more than the API server keeps in any
	// object.
	maxCopied = 8 << 20
	// imageTimeout bounds the copy of a container's root filesystem into an image.
	imageTimeout = 2 * time.Minute
	// blockBytes is the unit in which ext4 keeps files.
	blockBytes = 4096
	// spareInodes is how many files a container can make, beyond those of its image.
	spareInodes = 1 << 16
)

// rootTree is the root filesystem of a container, mounted on the host and used by nobody else. Nothing runs in it yet, so
// that a path that was resolved in it stays what it is.
type rootTree string

// resolve returns the path in the container without symbolic links; none leads out of the tree.
func (r rootTree) resolve(destination string) (string, error) {
	full, err := securejoin.SecureJoin(string(r), destination)
	if err != nil {
		return "", fmt.Errorf("%s in the root filesystem: %w", destination, err)
	}
	rel, err := filepath.Rel(string(r), full)
	if err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return "", fmt.Errorf("%s in the root filesystem is not below its root: %w", destination, errdefs.ErrInvalidArgument)
	}
	return "/" + rel, nil
}

// makeParent resolves a mount point and makes the directory that it is in.
func (r rootTree) makeParent(destination string) (string, error) {
	resolved, err := r.resolve(destination)
	if err != nil {
		return "", err
	}
	return resolved, os.MkdirAll(filepath.Join(string(r), filepath.Dir(resolved)), 0o755)
}

// makeDir resolves a directory and makes it.
func (r rootTree) makeDir(destination string) (string, error) {
	resolved, err := r.resolve(destination)
	if err != nil {
		return "", err
	}
	return resolved, os.MkdirAll(filepath.Join(string(r), resolved), 0o755)
}

// copyIn copies a file or directory of the host to a place in the tree, and returns that place.
func (r rootTree) copyIn(source, destination string) (string, error) {
	resolved, err := r.makeParent(destination)
	if err != nil {
		return "", err
	}
	left := int64(maxCopied)
	err = filepath.WalkDir(source, func(from string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(source, from)
		if err != nil {
			return err
		}
		return copyOne(from, filepath.Join(string(r), resolved, rel), &left)
	})
	if err != nil {
		return "", fmt.Errorf("copy %s to %s: %w", source, destination, err)
	}
	return resolved, nil
}

// copyOne copies one directory, file or symbolic link with its mode and owner, over what is there.
func copyOne(from, to string, left *int64) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	switch {
	case info.IsDir():
		err = os.Mkdir(to, info.Mode().Perm())
		if errors.Is(err, os.ErrExist) {
			err = nil
		}
	case info.Mode().IsRegular():
		if *left -= info.Size(); *left < 0 {
			return fmt.Errorf("it has more than %d bytes: %w", maxCopied, errdefs.ErrFailedPrecondition)
		}
		err = copyFile(from, to, info.Size())
	case info.Mode().Type() == fs.ModeSymlink:
		var target string
		if target, err = os.Readlink(from); err == nil {
			err = os.Symlink(target, to)
		}
	default:
		return fmt.Errorf("%s is neither a file nor a directory: %w", from, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(from, &st); err != nil {
		return err
	}
	if err := os.Lchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if info.Mode().Type() == fs.ModeSymlink {
		return nil
	}
	return unix.Chmod(to, st.Mode&0o7777)
}

func copyFile(from, to string, most int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, io.LimitReader(in, most))
	return errors.Join(err, out.Close())
}

// measure returns what a tree needs in an image: bytes of whole blocks, and inodes.
func (r rootTree) measure() (size, inodes int64, err error) {
	err = filepath.WalkDir(string(r), func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		inodes++
		size += blockBytes // what is in no block of its own: extents, directories, attributes
		if info.Mode().IsRegular() {
			size += (info.Size() + blockBytes - 1) / blockBytes * blockBytes
		}
		return nil
	})
	return size, inodes, err
}

// inodeBytes is the size of an inode that mkfs.ext4 makes.
const inodeBytes = 256

// makeImage copies the tree into a new ext4 image with spare bytes to write. The image is sparse. It has no journal: it is
// thrown away with the machine that uses it.
func (r rootTree) makeImage(ctx context.Context, file string, spare int64) error {
	size, inodes, err := r.measure()
	if err != nil {
		return fmt.Errorf("measure root filesystem: %w", err)
	}
	inodes += spareInodes
	size = (size+size/8+inodes*inodeBytes+spare)/blockBytes*blockBytes + 16<<20
	if err := newFile(file, size); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, imageTimeout)
	defer cancel()
	err = runTool(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard",
		"-N", fmt.Sprint(inodes), "-d", string(r), file)
	if err != nil {
		return errors.Join(fmt.Errorf("root filesystem: %w", err), os.Remove(file))
	}
	return nil
}

func newFile(file string, size int64) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	return errors.Join(f.Truncate(size), f.Close())
}

// runTool runs a command whose output matters only if it fails.
func runTool(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		out = bytes.TrimSpace(out[max(0, len(out)-2048):])
		return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, out)
	}
	return nil
}
