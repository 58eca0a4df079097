package vm_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

func TestMain(m *testing.M) { os.Exit(vm.Main(m)) }

const mib = 1 << 20

// usual is a size for which both filesystems can be made.
const usual = 320 * mib

const (
	never        = guestv1.FormatPolicy_FORMAT_POLICY_NEVER
	neverWritten = guestv1.FormatPolicy_FORMAT_POLICY_NEVER_WRITTEN
	unfinished   = guestv1.FormatPolicy_FORMAT_POLICY_UNFINISHED_FORMAT
)

// filesystems are what most tests are repeated for.
var filesystems = []string{"ext4", "xfs"}

// newImage makes a sparse file.
func newImage(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(vm.Dir(t), "disk.img")
	grow(t, path, size)
	return path
}

// grow makes a file larger, or makes it.
func grow(t testing.TB, path string, size int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
}

// put writes bytes into a file.
func put(t testing.TB, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

// get reads bytes of a file.
func get(t testing.TB, path string, at, length int64) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, length)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	return b
}

// host runs a command on the host and returns what it has written.
func host(t testing.TB, argv ...string) (string, error) {
	t.Helper()
	ctx, cancel := cleanupContext(t)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if path, err := exec.LookPath(filepath.Join("/usr/sbin", argv[0])); err == nil {
		cmd.Path, cmd.Err = path, nil
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// mustHost is host for a command that has to succeed.
func mustHost(t testing.TB, argv ...string) string {
	t.Helper()
	out, err := host(t, argv...)
	if err != nil {
		t.Fatalf("%q: %v: %s", argv, err, out)
	}
	return out
}

// digest is over the content of a file.
func digest(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// attach plugs a file in until the test ends, or it detaches it itself.
func attach(t testing.TB, m *vm.Machine, serial, path string) {
	t.Helper()
	m.Attach(t, qemu.Disk{Serial: serial, Path: path})
	t.Cleanup(func() { remove(t, m, serial) })
}

// remove unmounts a volume and plugs it out, if the machine still runs.
func remove(t testing.TB, m *vm.Machine, serial string) {
	t.Helper()
	select {
	case <-m.Done():
		return
	default:
	}
	ctx, cancel := cleanupContext(t)
	defer cancel()
	if _, err := m.Agent().UnmountVolume(ctx, &guestv1.UnmountVolumeRequest{MountPath: mountPath(serial)}); err != nil {
		t.Errorf("unmount %s: %v", serial, err)
	}
	if err := m.DetachDisk(ctx, serial); err != nil {
		t.Errorf("detach %s: %v", serial, err)
	}
}

// mountPath is where volumes are in guests.
func mountPath(serial string) string { return "/run/volumes/" + serial }

// request asks for a volume at its usual place.
func request(serial, fsType string, format guestv1.FormatPolicy) *guestv1.MountVolumeRequest {
	return &guestv1.MountVolumeRequest{Serial: serial, MountPath: mountPath(serial), FsType: fsType, Format: format}
}

// fresh attaches a blank file and mounts a new filesystem on it. It returns the file.
func fresh(t testing.TB, m *vm.Machine, serial, fsType string, size int64) string {
	t.Helper()
	path := newImage(t, size)
	attach(t, m, serial, path)
	if resp := m.Mount(t, request(serial, fsType, neverWritten)); !resp.GetFormatted() {
		t.Fatalf("no filesystem was made: %v", resp)
	}
	return path
}

// blocks is how much of a file is allocated, in units of 512 bytes.
func blocks(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks
}

// restart runs one test of this binary in another process.
func restart(t testing.TB, test string, env ...string) (*exec.Cmd, io.Reader) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, out
}

// lines returns what comes from a reader, line by line.
func lines(r io.Reader) iter.Seq[string] {
	return func(yield func(string) bool) {
		for s := bufio.NewScanner(r); s.Scan(); {
			if !yield(s.Text()) {
				return
			}
		}
	}
}
