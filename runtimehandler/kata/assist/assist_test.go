package assist_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/test/priv"
)

// parentEnv makes the test binary a parent whose child hangs; its value is how long, as an argument of sleep(1).
const parentEnv = "CRUST_TEST_ASSIST_PARENT"

func TestMain(m *testing.M) {
	assist.Main()
	if long := os.Getenv(parentEnv); long != "" {
		fmt.Println(assist.Run(context.Background(), hanging(long), assist.Work{}))
		return
	}
	os.Exit(m.Run())
}

// hanging is a child with a tool that does not end.
func hanging(long string) []string { return []string{"sh", "-c", "setsid sleep " + long + " & wait"} }

func image(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func command(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}

func look(t *testing.T, device string) assist.Found {
	t.Helper()
	f, err := assist.Look(device)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// clean checks that a run has left no mount and no loop device.
func clean(t *testing.T, device string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || bytes.Contains(mounts, []byte("crust-assist-")) {
		t.Errorf("a mount is left: %v\n%s", err, mounts)
	}
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		if raw, _ := os.ReadFile(file); strings.TrimSpace(string(raw)) == device {
			t.Errorf("a loop device is left: %s", file)
		}
	}
}

func TestAllSteps(t *testing.T) {
	priv.Root(t)
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			const small, large = 320 << 20, 640 << 20
			device := image(t, small)
			w := assist.Work{Device: device, FSType: fsType, SizeBytes: small, NeverWritten: true, Steps: []assist.Step{assist.Format}}
			run := func() {
				t.Helper()
				if err := assist.Run(t.Context(), nil, w); err != nil {
					t.Fatal(err)
				}
				clean(t, device)
			}
			run()
			if f := look(t, device); f.FSType != fsType || f.Smaller(small) || f.Errors {
				t.Errorf("after a format: %+v", f)
			}
			run() // a former child has done it
			if err := os.Truncate(device, large); err != nil {
				t.Fatal(err)
			}
			if !look(t, device).Smaller(large) {
				t.Error("it is not smaller than its device")
			}
			group := uint32(4711)
			w.Steps, w.SizeBytes, w.Group = []assist.Step{assist.Check, assist.Grow, assist.Chown}, large, &group
			run()
			if f := look(t, device); f.Smaller(large) {
				t.Errorf("after growing: %+v", f)
			}
			dir := t.TempDir()
			command(t, "mount", "-o", "loop", device, dir)
			defer command(t, "umount", dir)
			var st unix.Stat_t
			if err := unix.Stat(dir, &st); err != nil || st.Gid != group || st.Mode&unix.S_ISGID == 0 {
				t.Errorf("its root has group %d, mode %o, %v", st.Gid, st.Mode, err)
			}
		})
	}
}

func TestNothingIsFormattedThatMayHoldData(t *testing.T) {
	priv.Root(t)
	for name, tc := range map[string]struct {
		content string
		known   bool
	}{"nothing is known of it": {"", false}, "a byte contradicts": {"x", true}} {
		t.Run(name, func(t *testing.T) {
			device := image(t, 64<<20)
			f, err := os.OpenFile(device, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteAt([]byte(tc.content), 1<<20); err != nil {
				t.Fatal(err)
			}
			_ = f.Close()
			before := command(t, "sha256sum", device)
			err = assist.Run(t.Context(), nil, assist.Work{Device: device, FSType: "ext4", NeverWritten: tc.known, Steps: []assist.Step{assist.Format}})
			if !errdefs.IsFailedPrecondition(err) {
				t.Errorf("format: %v", err)
			}
			if after := command(t, "sha256sum", device); after != before {
				t.Error("the device has changed")
			}
		})
	}
}

func TestDamageIsReported(t *testing.T) {
	priv.Root(t)
	device := image(t, 64<<20)
	command(t, "mkfs.ext4", "-q", "-O", "^metadata_csum", device)
	// Errors are noted, and the table of inodes is gone.
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	state := []byte{0, 0}
	if _, err := f.ReadAt(state, 1024+0x3a); err != nil {
		t.Fatal(err)
	}
	state[0] |= 2
	_, err = f.WriteAt(state, 1024+0x3a)
	_, err2 := f.WriteAt(bytes.Repeat([]byte{0xa5}, 4<<20), 64<<10)
	if err := errors.Join(err, err2, f.Close()); err != nil {
		t.Fatal(err)
	}
	if !look(t, device).Errors {
		t.Error("its errors are not seen")
	}
	err = assist.Run(t.Context(), nil, assist.Work{Device: device, FSType: "ext4", Steps: []assist.Step{assist.Check}})
	if !errdefs.IsDataLoss(err) {
		t.Errorf("check: %v, want ErrDataLoss", err)
	}
}

// TestADeviceInUseIsLeftAlone: a VMM has its locks on the disk (fcntl(2), open file description locks).
func TestADeviceInUseIsLeftAlone(t *testing.T) {
	priv.Root(t)
	device := image(t, 64<<20)
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// A byte of QEMU's range.
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Start: 100, Len: 1}); err != nil {
		t.Fatal(err)
	}
	err = assist.Run(t.Context(), nil, assist.Work{Device: device, FSType: "ext4", NeverWritten: true, Steps: []assist.Step{assist.Format}})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("format: %v", err)
	}
}

// TestTheChildEndsInTime: a tool that hangs costs the time limit, and dies with the child.
func TestTheChildEndsInTime(t *testing.T) {
	priv.Root(t)
	long := fmt.Sprintf("600.%09d", time.Now().UnixNano()%1e9)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	err := assist.Run(ctx, hanging(long), assist.Work{})
	if !errdefs.IsUnavailable(err) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("run: %v", err)
	}
	await(t, long, false)
}

// TestTheChildGoesWithItsParent: whatever kills the daemon kills what it has started, so that nothing writes to the device
// any more when the next daemon looks at it.
func TestTheChildGoesWithItsParent(t *testing.T) {
	priv.Root(t)
	long := fmt.Sprintf("601.%09d", time.Now().UnixNano()%1e9)
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentEnv+"="+long)
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, long, true)
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	await(t, long, false)
}

// TestAProgramThatIsNone: a program whose main function does not call Main is told from one that has done the work.
func TestAProgramThatIsNone(t *testing.T) {
	priv.Root(t)
	for _, program := range [][]string{{"true"}, {"false"}, {"echo", "{"}, {"/nowhere"}} {
		if err := assist.Run(t.Context(), program, assist.Work{}); !errdefs.IsUnavailable(err) {
			t.Errorf("%v: %v", program, err)
		}
	}
}

// await waits until a tool runs, or does not any more.
func await(t *testing.T, long string, running bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		found := false
		lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, path := range lines {
			raw, _ := os.ReadFile(path)
			found = found || bytes.HasPrefix(raw, []byte("sleep\x00"+long))
		}
		if found == running {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("sleep %s: running is %t", long, found)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestLookAtWhatIsNone(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, t.TempDir(), "/dev/null", "/nowhere"} {
		if f, err := assist.Look(path); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %+v, %v", path, f, err)
		}
	}
	if f := look(t, image(t, 512)); f != (assist.Found{}) {
		t.Errorf("on a short file: %+v", f)
	}
}

// FuzzSuperblock: whatever a guest has written, sizes are sizes.
func FuzzSuperblock(f *testing.F) {
	f.Add([]byte("XFSB\x00\x00\x10\x00\x00\x00\x00\x00\x00\x01\x00\x00"), []byte{})
	f.Add([]byte{}, bytes.Repeat([]byte{0xff}, 1024))
	f.Fuzz(func(t *testing.T, head, ext []byte) {
		raw := make([]byte, 4096)
		copy(raw, head)
		copy(raw[1024:], ext[:min(len(ext), 1024)])
		path := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		if found, err := assist.Look(path); err != nil || found.Bytes < 0 {
			t.Errorf("%+v, %v", found, err)
		}
	})
}

// TestABlockDevice: the same on a block device, and not while it is mounted.
func TestABlockDevice(t *testing.T) {
	priv.Root(t)
	backing := image(t, 64<<20)
	device := strings.TrimSpace(command(t, "losetup", "--find", "--show", backing))
	t.Cleanup(func() { command(t, "losetup", "-d", device) })
	group := uint32(4711)
	w := assist.Work{
		Device: device, FSType: "ext4", SizeBytes: 64 << 20, NeverWritten: true, Group: &group, OnRootMismatch: true,
		Steps: []assist.Step{assist.Format, assist.Check, assist.Chown},
	}
	for range 2 {
		if err := assist.Run(t.Context(), nil, w); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	command(t, "mount", device, dir)
	err := assist.Run(t.Context(), nil, w)
	command(t, "umount", dir)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("on a mounted device: %v", err)
	}
}
