// Package scratch gives tests filesystems of their own, on loop devices and in a directory that is looked through for
// leftovers at the end. Nothing but tests imports it.
package scratch

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Main runs a package's tests in a temporary directory of their own (TMPDIR) and fails if they leave a mount or a loop
// device there. Call it from TestMain.
func Main(m *testing.M) int {
	base, err := os.MkdirTemp("", "csi")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := os.Setenv("TMPDIR", base); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	left := leftovers(base)
	// The kernel detaches a loop device a moment after its last mount has gone, in whatever namespace that was.
	for tries := 0; len(left) > 0 && tries < 100; tries++ {
		time.Sleep(20 * time.Millisecond)
		left = leftovers(base)
	}
	if len(left) > 0 {
		fmt.Fprintf(os.Stderr, "FAIL: the tests have left behind:\n%s\n", strings.Join(left, "\n"))
		return 1
	}
	if err := os.RemoveAll(base); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// leftovers lists mounts and loop devices under a directory.
func leftovers(base string) []string {
	var found []string
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, base+"/") {
			found = append(found, "mount: "+strings.TrimSpace(line))
		}
	}
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		if raw, err := os.ReadFile(file); err == nil && bytes.HasPrefix(raw, []byte(base+"/")) {
			found = append(found, "loop device: "+file+": "+strings.TrimSpace(string(raw)))
		}
	}
	return found
}

// Dir returns a new directory with a short path, for sockets. It is not removed by itself but with [Main]'s directory.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Filesystem makes a filesystem of fstype ("xfs", "btrfs", "ext4") and size bytes, mounts it, and returns the directory.
// It is unmounted when the test ends, which fails if something still uses it, and its space is given back then: all
// filesystems of a package's tests together are more than a small machine's disk.
func Filesystem(t testing.TB, fstype string, size int64) string {
	t.Helper()
	base := Dir(t)
	image, dir := filepath.Join(base, "image"), filepath.Join(base, "fs")
	Sparse(t, image, size)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	force := "-f"
	if fstype == "ext4" {
		force = "-F"
	}
	Run(t, "mkfs."+fstype, "-q", force, image)
	Run(t, "mount", "-t", fstype, "-o", "loop", image, dir)
	t.Cleanup(func() {
		// A process that is just being started in a mount namespace of its own, by whatever test, has copies of all mounts for a
		// moment, and with them the loop devices whose files are here.
		var err error
		for tries := 0; tries < 100; tries++ {
			if err = unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); !errors.Is(err, unix.EBUSY) {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if err != nil {
			t.Errorf("umount %s: %v", dir, err)
			return
		}
		if err := os.Remove(image); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Sparse makes a file of size bytes without data.
func Sparse(t testing.TB, path string, size int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// Run runs a command that must succeed and returns what it printed.
func Run(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}

// Fill writes to a file until its filesystem has no space left, not even for a small block.
func Fill(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for block := 4 << 20; block >= 4096; block /= 4 {
		data := bytes.Repeat([]byte("x"), block)
		for err = nil; err == nil; {
			_, err = f.Write(data)
		}
		_ = f.Sync() // what was promised too generously comes back
	}
	_ = f.Close()
}

// FillNames makes small files in a directory until there is no space for another one, and again when it was synced.
func FillNames(t testing.TB, dir string) {
	t.Helper()
	for i, made := 0, 1; made > 0; {
		made = 0
		for ; os.WriteFile(filepath.Join(dir, fmt.Sprintf("%0200d", i)), make([]byte, 1024), 0o600) == nil; i++ {
			made++
		}
		i++ // the name may be there without the data
		Run(t, "sync", "-f", dir)
	}
}

// CanGrowExt4 skips a test where this process cannot grow a mounted ext4: the kernel wants CAP_SYS_RESOURCE for it, which
// root does not have in every container. Where CRUST_REQUIRE contains "cap_sys_resource" it fails instead.
func CanGrowExt4(t testing.TB) {
	t.Helper()
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "CapEff:\t")
	effective, _, _ := strings.Cut(rest, "\n")
	bits, err := strconv.ParseUint(effective, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	if bits&(1<<unix.CAP_SYS_RESOURCE) != 0 {
		return
	}
	if strings.Contains(os.Getenv("CRUST_REQUIRE"), "cap_sys_resource") {
		t.Fatal("CRUST_REQUIRE demands CAP_SYS_RESOURCE, and this process lacks it")
	}
	t.Skip("needs CAP_SYS_RESOURCE to grow a mounted ext4")
}
