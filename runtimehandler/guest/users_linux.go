package guest

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/device"
)

// user is a process that uses a filesystem.
type user struct {
	pid  int
	name string
}

func (u user) String() string { return fmt.Sprintf("%s (pid %d)", u.name, u.pid) }

// usersOf finds the processes that have something of a device's filesystem open, as working directory or root, mapped, or
// mounted in a mount namespace of their own. A process that ends meanwhile is left out.
func usersOf(dev device.Device) ([]user, error) {
	var st unix.Stat_t
	if err := unix.Stat(dev.Path, &st); err != nil {
		return nil, fmt.Errorf("device %s: %w", dev.Name, err)
	}
	self, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var users []user
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		if hasOpen(dir, st.Rdev) || hasMapped(dir, st.Rdev) || hasMounted(dir, self, st.Rdev) {
			name, _ := os.ReadFile(filepath.Join(dir, "comm"))
			users = append(users, user{pid: pid, name: strings.TrimSpace(string(name))})
		}
	}
	return users, nil
}

// hasOpen looks at what a process has open.
func hasOpen(proc string, dev uint64) bool {
	links := []string{"cwd", "root", "exe"}
	if fds, err := os.ReadDir(filepath.Join(proc, "fd")); err == nil {
		for _, fd := range fds {
			links = append(links, filepath.Join("fd", fd.Name()))
		}
	}
	for _, link := range links {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(proc, link), &st); err == nil && st.Dev == dev {
			return true
		}
	}
	return false
}

// hasMapped looks at the devices of its mapped files (proc_pid_maps(5)).
func hasMapped(proc string, dev uint64) bool {
	want := fmt.Sprintf("%02x:%02x", unix.Major(dev), unix.Minor(dev))
	return anyLine(filepath.Join(proc, "maps"), func(fields []string) bool { return len(fields) > 3 && fields[3] == want })
}

// hasMounted looks at the mounts of a process in another mount namespace (proc_pid_mountinfo(5)).
func hasMounted(proc, self string, dev uint64) bool {
	if ns, err := os.Readlink(filepath.Join(proc, "ns", "mnt")); err != nil || ns == self {
		return false
	}
	want := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
	return anyLine(filepath.Join(proc, "mountinfo"), func(fields []string) bool { return len(fields) > 2 && fields[2] == want })
}

func anyLine(path string, match func(fields []string) bool) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if match(strings.Fields(lines.Text())) {
			return true
		}
	}
	return false
}
