package convert

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

const (
	commandName   = "convert-image"
	orderVariable = "CRUST_CONVERT_ORDER"

	// inPath and outPath are where the child has its two files.
	inPath  = "/in"
	outPath = "/out"

	// setupFailed is the child's exit code if it did not get so far as to run anything.
	setupFailed = 125
)

// order is what the child has to do.
type order struct {
	// Argv is the command line. Tools are the paths of prlimit(1) and of the program.
	Argv  []string
	Tools [2]string
	// Dir is where the new root is mounted.
	Dir string
	UID int
	// Memory, FileSize and CPU are limits in bytes and seconds.
	Memory, FileSize, CPU int64
	Binds                 []bind
}

// bind is a file of the host, and where the child sees it.
type bind struct {
	From, At string
	Writable bool
}

// Main becomes qemu-img, if this process was started for it by [Converter.Convert]. Otherwise it returns at once. It is the
// first thing that a main function does, before flags are read or goroutines started.
func Main() {
	if len(os.Args) != 2 || os.Args[1] != commandName {
		return
	}
	fmt.Fprintln(os.Stderr, "the child that converts:", become())
	os.Exit(setupFailed)
}

// become furnishes the namespaces, gives up all rights and executes the order. It returns only if that fails.
func become() error {
	runtime.LockOSThread() // some of what follows is of this thread only, and exec leaves no other
	var o order
	if err := json.Unmarshal([]byte(os.Getenv(orderVariable)), &o); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	if os.Getpid() != 1 {
		return errors.New("it is not in a namespace of its own")
	}
	if err := o.furnish(); err != nil {
		return err
	}
	for limit, value := range map[int]int64{unix.RLIMIT_CPU: o.CPU, unix.RLIMIT_FSIZE: o.FileSize, unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: 64, unix.RLIMIT_MEMLOCK: 0, unix.RLIMIT_STACK: 2 << 20} {
		if err := unix.Setrlimit(limit, &unix.Rlimit{Cur: uint64(value), Max: uint64(value)}); err != nil {
			return fmt.Errorf("limit %d: %w", limit, err)
		}
	}
	if err := dropRights(o.UID); err != nil {
		return err
	}
	return fmt.Errorf("execute %s: %w", o.Tools[0], unix.Exec(o.Tools[0], o.commandLine(), environment))
}

// environment keeps the C library from setting address space aside for each of QEMU's threads.
var environment = []string{"LC_ALL=C", "PATH=/usr/bin", "MALLOC_ARENA_MAX=1"}

// commandLine has prlimit set the limit of memory: Go's runtime has more than that already, and dies of it if it wants another
// page before it is replaced.
func (o order) commandLine() []string {
	return append([]string{"prlimit", fmt.Sprintf("--as=%d", o.Memory), "--", o.Tools[1]}, o.Argv[1:]...)
}

// furnish makes a root of /usr and of the files.
func (o order) furnish() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// What is in o.Dir is not to be seen after the next step, so it is opened before.
	files := make([]int, len(o.Binds))
	for i, b := range o.Binds {
		var err error
		if files[i], err = unix.Open(b.From, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
			return fmt.Errorf("%s: %w", b.From, err)
		}
	}
	if err := unix.Mount("tmpfs", o.Dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=64k,mode=755"); err != nil {
		return fmt.Errorf("mount a root: %w", err)
	}
	for _, name := range []string{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		if err := o.system(name); err != nil {
			return fmt.Errorf("/%s: %w", name, err)
		}
	}
	for i, b := range o.Binds {
		if err := b.mount(filepath.Join(o.Dir, b.At), files[i]); err != nil {
			return fmt.Errorf("%s: %w", b.At, err)
		}
	}
	// pivot_root(2): "." may be both, then the old root lies on top of the new one.
	if err := unix.Chdir(o.Dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

func (b bind) mount(at string, file int) error {
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		return err
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	if !b.Writable {
		flags |= unix.MS_RDONLY
	}
	return errors.Join(bindAt(fmt.Sprintf("/proc/self/fd/%d", file), at, flags), unix.Close(file))
}

// system brings a directory of programs and libraries into the new root, or the link to one.
func (o order) system(name string) error {
	from, at := "/"+name, filepath.Join(o.Dir, name)
	info, err := os.Lstat(from)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() == os.ModeSymlink:
		to, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(to, at)
	}
	if err := os.Mkdir(at, 0o755); err != nil {
		return err
	}
	return bindAt(from, at, unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV)
}

func bindAt(from, at string, flags uintptr) error {
	if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
}

// dropRights gives up the user id, the groups and the way back, for what is executed next.
func dropRights(uid int) error {
	if err := unix.Setgroups(nil); err != nil {
		return fmt.Errorf("setgroups: %w", err)
	}
	if err := unix.Setresgid(uid, uid, uid); err != nil {
		return fmt.Errorf("setresgid: %w", err)
	}
	if err := unix.Setresuid(uid, uid, uid); err != nil {
		return fmt.Errorf("setresuid: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	// The change of user has undone it (prctl(2)).
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("signal at the parent's death: %w", err)
	}
	return nil
}
