package filesystem

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Usage is a fill level with the meaning that CSI's VolumeUsage and Kubernetes give it: used is what is not free,
// available is what an unprivileged process may still take.
type Usage struct{ Total, Available, Used int64 }

// Stats measures a mounted filesystem, in bytes and in inodes.
func Stats(target string) (bytes, inodes Usage, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil {
		return Usage{}, Usage{}, fmt.Errorf("statfs %s: %w", target, err)
	}
	block := uint64(st.Bsize)
	bytes = Usage{Total: product(st.Blocks, block), Available: product(st.Bavail, block), Used: product(st.Blocks-st.Bfree, block)}
	inodes = Usage{Total: product(st.Files, 1), Available: product(st.Ffree, 1), Used: product(st.Files-st.Ffree, 1)}
	return bytes, inodes, nil
}

// product is clamped: a damaged filesystem may say anything.
func product(n, unit uint64) int64 {
	if unit != 0 && n > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return int64(n * unit)
}

// Health says what is wrong with a filesystem that was mounted from a device; empty if nothing is known to be. writable
// is how it was mounted.
func Health(target, device, fsType string, writable bool) (string, error) {
	var wrong []string
	var stat unix.Stat_t
	// XFS answers EIO to everything that reads an inode after it was shut down.
	if err := unix.Stat(target, &stat); errors.Is(err, unix.EIO) {
		wrong = append(wrong, "the filesystem was shut down after an error; it must be unmounted and checked")
	} else if err != nil {
		return "", fmt.Errorf("health of %s: %w", target, err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil {
		return "", fmt.Errorf("health of %s: %w", target, err)
	}
	if writable && st.Flags&unix.ST_RDONLY != 0 {
		wrong = append(wrong, "the kernel has turned the filesystem read-only after an error; it must be unmounted and checked")
	}
	if fsType == "ext4" {
		text, err := ext4Errors(filepath.Join("/sys/fs/ext4", filepath.Base(device)))
		if err != nil {
			return "", fmt.Errorf("health of %s: %w", target, err)
		}
		if text != "" {
			wrong = append(wrong, text)
		}
	}
	return strings.Join(wrong, "; "), nil
}

// ext4Errors reads what ext4 has counted (the kernel's Documentation/ABI/testing/sysfs-fs-ext4). The counters are on
// the device and stay until a check clears them.
func ext4Errors(dir string) (string, error) {
	attribute := func(name string) (string, error) {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, os.ErrNotExist) {
			return "", nil // an older kernel
		}
		return strings.TrimSpace(string(content)), err
	}
	text, err := attribute("errors_count")
	if err != nil || text == "" {
		return "", err
	}
	count, err := strconv.ParseUint(text, 10, 64)
	if err != nil || count == 0 {
		return "", err
	}
	where, err := attribute("last_error_func")
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("ext4 has counted %d error(s), the last one in %s; it must be unmounted and checked", count, where), nil
}
