package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/command"
	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

func (p *Pool) imagePath() string { return filepath.Join(p.cfg.Dir, "pool.img") }
func (p *Pool) mountPath() string { return filepath.Join(p.cfg.Dir, "mnt") }

// direct reports whether the directory itself holds the pool: what is there decides, and in an empty directory what its
// filesystem can do.
func (p *Pool) direct() (bool, error) {
	for name, direct := range map[string]bool{"pool.json": true, "catalog.db": true, "pool.img": false} {
		if _, err := os.Lstat(filepath.Join(p.cfg.Dir, name)); err == nil {
			return direct, nil
		} else if !errors.Is(err, os.ErrNotExist) {
			return false, err
		}
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(p.cfg.Dir, &fs); err != nil {
		return false, err
	}
	if fs.Type != unix.XFS_SUPER_MAGIC && fs.Type != unix.BTRFS_SUPER_MAGIC {
		return false, nil
	}
	err := reflink.Verify(p.cfg.Dir)
	if errors.Is(err, errdefs.ErrFailedPrecondition) {
		return false, nil // XFS from before reflink
	}
	return err == nil, err
}

// mountImage mounts the image, which it makes if there is none, and moves the pool's root there.
func (p *Pool) mountImage(ctx context.Context) error {
	if _, err := os.Lstat(p.imagePath()); errors.Is(err, os.ErrNotExist) {
		if err := p.makeImage(ctx); err != nil {
			return fmt.Errorf("make %s: %w", p.imagePath(), err)
		}
	} else if err != nil {
		return err
	}
	p.cfg.Log.WarnContext(ctx, "the pool is an image file on another filesystem: for trial use only, because that filesystem can fill up underneath it",
		rpc.LogPath, p.imagePath())
	if err := os.Mkdir(p.mountPath(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := p.ensureMounted(ctx); err != nil {
		return fmt.Errorf("mount %s: %w", p.imagePath(), err)
	}
	if err := unix.Mount("", p.mountPath(), "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make %s a private mount: %w", p.mountPath(), err)
	}
	p.mounted, p.root = true, p.mountPath()
	return nil
}

func (p *Pool) makeImage(ctx context.Context) error {
	size, err := p.imageSize()
	if err != nil {
		return err
	}
	unfinished := p.imagePath() + ".new"
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(unfinished, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return err
	}
	if _, err := command.Run(ctx, "mkfs.xfs", "-q", "-m", "reflink=1", unfinished); err != nil {
		return errors.Join(err, os.Remove(unfinished))
	}
	crashpoint.At(ctx, "image made under its temporary name")
	f, err = os.Open(unfinished)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(unfinished, p.imagePath()); err != nil {
		return err
	}
	crashpoint.At(ctx, "image renamed")
	return syncDir(p.cfg.Dir)
}

func (p *Pool) imageSize() (int64, error) {
	if p.cfg.ImageSize > 0 {
		return p.cfg.ImageSize, nil
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(p.cfg.Dir, &fs); err != nil {
		return 0, err
	}
	half := int64(fs.Bavail) * fs.Bsize / 2
	return max(half&^(1<<20-1), 1<<30), nil
}

// ensureMounted finds the image mounted, by its device and inode number, or mounts it.
func (p *Pool) ensureMounted(ctx context.Context) error {
	attached, err := loopdev.Find(p.imagePath())
	if err != nil {
		return err
	}
	there, err := hostmount.At(p.mountPath())
	if err != nil {
		return err
	}
	if there != nil {
		if there.Root != "/" || !loopdev.Holds(attached, there.Dev) {
			return fmt.Errorf("%s is a mount of something else; unmount it: %w", p.mountPath(), errdefs.ErrFailedPrecondition)
		}
		return nil
	}
	device := ""
	if len(attached) > 0 {
		// Mounted where this process cannot see it, or about to go. The same device is the same filesystem; another device
		// of the same file would be a second one.
		device = attached[0].Path
	} else {
		dev, err := loopdev.Attach(ctx, p.imagePath(), loopdev.Options{})
		if err != nil {
			return err
		}
		defer dev.Close()
		if !dev.Direct {
			p.cfg.Log.WarnContext(ctx, "the filesystem under the image cannot do direct I/O: data is cached twice", rpc.LogPath, p.imagePath())
		}
		device = dev.Path
	}
	crashpoint.At(ctx, "image attached")
	const flags = unix.MS_NOATIME | unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOEXEC
	if err := unix.Mount(device, p.mountPath(), "xfs", flags, "discard"); err != nil {
		return err
	}
	crashpoint.At(ctx, "image mounted")
	return nil
}

// unmountImage leaves the image mounted if it is in use: a sandbox may have a volume open, and the next process finds it.
func (p *Pool) unmountImage(ctx context.Context) error {
	err := hostmount.Unmount(ctx, p.mountPath())
	if errors.Is(err, unix.EBUSY) {
		p.cfg.Log.InfoContext(ctx, "volumes are in use: the pool's image stays mounted", rpc.LogPath, p.mountPath())
		return nil
	}
	return err
}
