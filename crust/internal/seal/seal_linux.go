package seal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	// source is what the mount table shows for a seal.
	source = "crust-seal"
	// sealedDir is the directory of the bpf filesystem that covers the target path.
	sealedDir = "volume"
)

// Vacant is nil if a target path can be sealed: it is not there yet, or sealed already, or an empty directory.
// ErrFailedPrecondition otherwise. It changes nothing.
func Vacant(target string) error {
	if _, err := os.Lstat(target); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if intact, err := Intact(target); err != nil || intact {
		return err
	}
	return requireEmpty(target)
}

// Make makes the directory at a target path, whose parent exists (CSI specification, NodePublishVolume), and seals it.
// It succeeds if it is sealed already. ErrFailedPrecondition if there is anything in it or mounted on it.
func Make(target string) error {
	if err := os.Mkdir(target, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("target path: %w", err)
	}
	intact, err := Intact(target)
	if err != nil || intact {
		return err
	}
	if err := requireEmpty(target); err != nil {
		return err
	}
	if err := mount(target); err != nil {
		return fmt.Errorf("seal %s with a bpf filesystem: %w; crustd needs CAP_SYS_ADMIN, and a kernel with CONFIG_BPF_SYSCALL: %w",
			target, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// mount puts a directory of a new bpf filesystem on a target path, in one step that others can see. It is not the
// root directory because some kernels put files for debugging there (CONFIG_BPF_PRELOAD), which are not for pods.
func mount(target string) (err error) {
	fs, err := unix.Fsopen("bpf", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("fsopen: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fs)) }()
	if err := errors.Join(unix.FsconfigSetString(fs, "source", source), unix.FsconfigSetString(fs, "mode", "0700"), unix.FsconfigCreate(fs)); err != nil {
		return fmt.Errorf("fsconfig: %w", err)
	}
	root, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return fmt.Errorf("fsmount: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(root)) }()
	if err := unix.Mkdirat(root, sealedDir, 0o750); err != nil {
		return fmt.Errorf("mkdir: %w", err)
	}
	dir, err := unix.OpenTree(root, sealedDir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(dir)) }()
	if err := unix.MoveMount(dir, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// requireEmpty refuses to cover what somebody may still want.
func requireEmpty(target string) error {
	info, err := os.Lstat(target)
	if err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	if !info.IsDir() {
		return fmt.Errorf("target path %s exists and is not a directory: %w", target, errdefs.ErrFailedPrecondition)
	}
	mounted, err := mountinfo.Mounted(target)
	if err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	if mounted {
		return fmt.Errorf("something else is mounted at target path %s; unmount it first: %w", target, errdefs.ErrFailedPrecondition)
	}
	return requireNoEntries(target)
}

func requireNoEntries(target string) error {
	entries, err := os.ReadDir(target)
	if err != nil {
		return fmt.Errorf("target path: %w", err)
	}
	if len(entries) > 0 {
		return fmt.Errorf("target path %s is not empty (%s); save what is there and empty the directory: %w", target, entries[0].Name(), errdefs.ErrFailedPrecondition)
	}
	return nil
}

// Remove removes a seal and the directory under it. It succeeds if neither is there. Files under the seal are not ours:
// ErrFailedPrecondition, and they stay.
func Remove(target string) error {
	for {
		intact, err := Intact(target)
		if err != nil {
			return err
		}
		if !intact {
			break
		}
		// Nothing can be lost in a seal, so a runtime that still shows it to somebody need not keep it.
		if err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("remove the seal of %s: %w", target, err)
		}
	}
	err := os.Remove(target)
	switch {
	case err == nil, errors.Is(err, os.ErrNotExist):
		return nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return requireNoEntries(target)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("something else is mounted at target path %s; unmount it first: %w", target, errdefs.ErrFailedPrecondition)
	default:
		return fmt.Errorf("target path: %w", err)
	}
}

// Intact says whether a target path is sealed.
func Intact(target string) (bool, error) {
	mounted, err := mountinfo.Mounted(target)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("target path: %w", err)
	}
	if !mounted {
		return false, nil
	}
	return isBPF(target)
}

func isBPF(path string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, fmt.Errorf("statfs %s: %w", path, err)
	}
	return st.Type == unix.BPF_FS_MAGIC, nil
}

// ID tells one seal from another for as long as it is mounted.
type ID uint64

// Of returns the id of the seal at a target path; ok is false if there is none.
func Of(target string) (id ID, ok bool, err error) {
	if intact, err := Intact(target); err != nil || !intact {
		return 0, false, err
	}
	var st unix.Stat_t
	if err := unix.Stat(target, &st); err != nil {
		return 0, false, fmt.Errorf("stat %s: %w", target, err)
	}
	return ID(st.Dev), true, nil
}

// Locate finds out of which seal, and of which directory in it, a mount source is. For a subPath the kubelet does not
// hand over the target path but a bind mount of a directory beneath it, made elsewhere; the mount table tells where that
// comes from. ok is false if the path has nothing to do with a seal.
func Locate(path string) (id ID, sub string, ok bool, err error) {
	bpf, err := isBPF(path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EACCES) {
		return 0, "", false, nil
	}
	if err != nil || !bpf {
		return 0, "", false, err
	}
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return 0, "", false, fmt.Errorf("mount source: %w", err)
	}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "bpf" || m.Source != source || !beneath(resolved, m.Mountpoint), false
	})
	if err != nil {
		return 0, "", false, fmt.Errorf("mount table: %w", err)
	}
	return locate(resolved, mounts)
}

// locate picks the innermost mount that covers a path; of several at one mount point the last is on top.
func locate(path string, mounts []*mountinfo.Info) (id ID, sub string, ok bool, err error) {
	var top *mountinfo.Info
	for _, m := range mounts {
		if top == nil || len(m.Mountpoint) >= len(top.Mountpoint) {
			top = m
		}
	}
	if top == nil {
		return 0, "", false, nil // a bpf filesystem of somebody else's
	}
	rel, err := filepath.Rel(top.Mountpoint, path)
	if err != nil {
		return 0, "", false, fmt.Errorf("mount source: %w", err)
	}
	// The root of a bind mount whose directory was removed is marked so by the kernel; such a path leads nowhere.
	root := strings.TrimSuffix(top.Root, "//deleted")
	full := filepath.Join("/", root, rel)
	if !beneath(full, "/"+sealedDir) {
		return 0, "", false, nil
	}
	sub = strings.TrimPrefix(strings.TrimPrefix(full, "/"+sealedDir), "/")
	return ID(unix.Mkdev(uint32(top.Major), uint32(top.Minor))), sub, true, nil
}

func beneath(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
