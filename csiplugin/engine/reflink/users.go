package reflink

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/loopdev"
)

// maxUsers is how many users a message names.
const maxUsers = 3

// users describes who has a file open, for a message: " by loop device /dev/loop3, process 4711 (qemu-system-x86)". It is
// empty if nobody can be found, which proves nothing: other pid namespaces are not visible.
func users(ctx context.Context, path string) string {
	var found []string
	if devices, err := loopdev.Find(path); err == nil {
		for _, d := range devices {
			found = append(found, "loop device "+d.Path)
		}
	}
	found = append(found, processes(ctx, path)...)
	if len(found) == 0 {
		return ""
	}
	if len(found) > maxUsers {
		found = append(found[:maxUsers], "others")
	}
	return " by " + strings.Join(found, ", ")
}

// processes finds who has the file open by device and inode number, other than this process.
func processes(ctx context.Context, path string) []string {
	var file unix.Stat_t
	if err := unix.Lstat(path, &file); err != nil {
		return nil
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	self := fmt.Sprintf("/proc/%d", os.Getpid())
	var found []string
	for _, proc := range procs {
		if ctx.Err() != nil || len(found) > maxUsers {
			break
		}
		if proc != self && hasOpen(proc, filepath.Base(path), &file) {
			comm, _ := os.ReadFile(filepath.Join(proc, "comm"))
			found = append(found, fmt.Sprintf("process %s (%s)", filepath.Base(proc), strings.TrimSpace(string(comm))))
		}
	}
	return found
}

func hasOpen(proc, base string, file *unix.Stat_t) bool {
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return false // it has ended
	}
	for _, fd := range fds {
		link := filepath.Join(proc, "fd", fd.Name())
		// Only files of this name are looked at: stat of just any file can hang on a dead network filesystem.
		if target, err := os.Readlink(link); err != nil || filepath.Base(target) != base {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(link, &st) == nil && st.Dev == file.Dev && st.Ino == file.Ino {
			return true
		}
	}
	return false
}
