package hostmount

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Mount is what is mounted at a path, in this process's mount namespace.
type Mount struct {
	// Dev is the device number of the filesystem, as stat(2) has it in st_dev.
	Dev uint64
	// Root is which directory or file of the filesystem is mounted; "/" is all of it.
	Root string
	// FSType is the kernel's name of the filesystem.
	FSType string
	// ReadOnly says that nothing can be written through this mount: because of the mount, or of the filesystem beneath.
	ReadOnly bool
}

// At returns the topmost mount at a path, or nil if the path is not a mount point or does not exist. A symbolic link is
// not followed.
func At(path string) (*Mount, error) {
	fd, err := openPath(path)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("mount at %s: %w", path, err)
	}
	defer unix.Close(fd)
	m, err := mountOf(fd)
	if err != nil {
		return nil, fmt.Errorf("mount at %s: %w", path, err)
	}
	return m, nil
}

func openPath(path string) (int, error) {
	return unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

// mountOf returns the mount that an open path is the root of, or nil if it is not a mount's root. It does not touch the
// filesystem, which may have been shut down and fail even stat(2): it compares where the kernel says that the descriptor
// is with where the mount is.
func mountOf(fd int) (*Mount, error) {
	id, err := mountID(fd)
	if err != nil {
		return nil, err
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil, err
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return findMount(string(table), id, path)
}

// mountID reads on which mount an open path is (proc_pid_fdinfo(5)).
func mountID(fd int) (string, error) {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(info)) {
		if id, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			return strings.TrimSpace(id), nil
		}
	}
	return "", fmt.Errorf("fdinfo has no mnt_id: %w", errdefs.ErrNotImplemented)
}

// findMount finds a mount by its id in the text of mountinfo (proc_pid_mountinfo(5)). nil if it has gone, or is not mounted
// at the path.
func findMount(table, id, path string) (*Mount, error) {
	for line := range strings.Lines(table) {
		if got, _, _ := strings.Cut(line, " "); got != id {
			continue
		}
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		left, right := strings.Split(before, " "), strings.Split(after, " ")
		if !ok || len(left) < 6 || len(right) < 3 {
			return nil, fmt.Errorf("mountinfo line %q: %w", line, errdefs.ErrInternal)
		}
		if unescape.Replace(left[4]) != path {
			return nil, nil
		}
		dev, err := parseDev(left[2])
		if err != nil {
			return nil, fmt.Errorf("mountinfo line %q: %w", line, err)
		}
		return &Mount{Dev: dev, Root: left[3], FSType: right[0], ReadOnly: hasOption(left[5], "ro") || hasOption(right[2], "ro")}, nil
	}
	return nil, nil
}

// unescape undoes what mountinfo does to white space in paths.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#")

func parseDev(s string) (uint64, error) {
	major, minor, _ := strings.Cut(s, ":")
	a, err := strconv.ParseUint(major, 10, 32)
	if err != nil {
		return 0, err
	}
	b, err := strconv.ParseUint(minor, 10, 32)
	if err != nil {
		return 0, err
	}
	return unix.Mkdev(uint32(a), uint32(b)), nil
}

func hasOption(list, option string) bool {
	for o := range strings.SplitSeq(list, ",") {
		if o == option {
			return true
		}
	}
	return false
}
