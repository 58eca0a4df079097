package hostmount_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/test/priv"
)

func TestMain(m *testing.M) { os.Exit(scratch.Main(m)) }

func anything(*hostmount.Mount) bool { return true }

// volume is a sparse file on a loop device, and an empty directory.
func volume(t *testing.T, size int64) (file, device, dir string) {
	t.Helper()
	base := scratch.Dir(t)
	file, dir = filepath.Join(base, "file"), filepath.Join(base, "dir")
	scratch.Sparse(t, file, size)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	dev, err := loopdev.Attach(t.Context(), file, loopdev.Options{Lasting: true})
	if err != nil {
		t.Fatal(err)
	}
	_ = dev.Close()
	t.Cleanup(func() {
		if err := errors.Join(hostmount.Clear(context.Background(), dir, anything), loopdev.Detach(context.Background(), file)); err != nil {
			t.Error(err)
		}
	})
	return file, dev.Path, dir
}

var sizes = map[string]int64{"ext4": 16 << 20, "xfs": 300 << 20}

func TestFormatAndMount(t *testing.T) {
	priv.Root(t)
	for fstype, size := range sizes {
		t.Run(fstype, func(t *testing.T) {
			_, device, dir := volume(t, size)
			fs := hostmount.Filesystem{Device: device, Target: dir, Type: fstype, Flags: []string{"noatime"}}
			if found, err := hostmount.Probe(t.Context(), device); found != "" || err != nil {
				t.Fatalf("a blank device is %q, %v", found, err)
			}
			if err := fs.Format(t.Context()); err != nil {
				t.Fatal(err)
			}
			if found, err := hostmount.Probe(t.Context(), device); found != fstype || err != nil {
				t.Errorf("it is now %q, %v", found, err)
			}
			m, err := hostmount.At(dir)
			if err != nil || m == nil || m.FSType != fstype || m.Root != "/" || m.ReadOnly {
				t.Fatalf("mounted is %+v, %v", m, err)
			}
			usage, err := hostmount.UsageAt(dir, anything)
			if err != nil || usage.Bytes.Total <= size/2 || usage.Bytes.Total > size || usage.ReadOnly {
				t.Errorf("usage is %+v, %v", usage, err)
			}
		})
	}
}

func TestGrow(t *testing.T) {
	priv.Root(t)
	for fstype, size := range sizes {
		t.Run(fstype, func(t *testing.T) {
			if fstype == "ext4" {
				scratch.CanGrowExt4(t)
			}
			file, device, dir := volume(t, size)
			fs := hostmount.Filesystem{Device: device, Target: dir, Type: fstype}
			// A filesystem that has nowhere to grow stays as it is.
			if err := errors.Join(fs.Format(t.Context()), fs.Grow(t.Context())); err != nil {
				t.Fatal(err)
			}
			before, err := hostmount.UsageAt(dir, anything)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Truncate(file, 2*size), loopdev.Grow(file), fs.Grow(t.Context()), fs.Grow(t.Context())); err != nil {
				t.Fatal(err)
			}
			after, err := hostmount.UsageAt(dir, anything)
			if err != nil || after.Bytes.Total < before.Bytes.Total+size/2 {
				t.Errorf("grown from %+v to %+v, %v", before, after, err)
			}
		})
	}
}

func TestMountNeverFormats(t *testing.T) {
	priv.Root(t)
	file, device, dir := volume(t, 16<<20)
	err := hostmount.Filesystem{Device: device, Target: dir, Type: "ext4"}.Mount(t.Context())
	if err == nil {
		t.Error("a blank device was mounted")
	}
	raw, err := os.ReadFile(file)
	if err != nil || strings.Trim(string(raw), "\x00") != "" {
		t.Errorf("the device was written to (%v)", err)
	}
}

func TestErrorsShowNoMountFlags(t *testing.T) {
	priv.Root(t)
	_, device, dir := volume(t, 16<<20)
	fs := hostmount.Filesystem{Device: device, Target: dir, Type: "ext4", Flags: []string{"secret=hunter2"}}
	if err := fs.Format(t.Context()); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}

func TestACancelledFormatEnds(t *testing.T) {
	priv.Root(t)
	_, device, dir := volume(t, 16<<20)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := hostmount.Filesystem{Device: device, Target: dir, Type: "ext4"}.Format(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestDamageThatTheCheckLeavesIsNotMounted(t *testing.T) {
	priv.Root(t)
	_, device, dir := volume(t, 16<<20)
	fs := hostmount.Filesystem{Device: device, Target: dir, Type: "ext4"}
	if err := errors.Join(fs.Format(t.Context()), hostmount.Clear(context.Background(), dir, anything)); err != nil {
		t.Fatal(err)
	}
	// fsck -a gives up on a root directory that is none.
	scratch.Run(t, "debugfs", "-w", "-R", "set_inode_field <2> mode 0100644", device)
	scratch.Run(t, "debugfs", "-w", "-R", "set_super_value state 2", device)
	if err := fs.Mount(t.Context()); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("got %v", err)
	}
}

func TestBind(t *testing.T) {
	priv.Root(t)
	source := scratch.Filesystem(t, "ext4", 16<<20)
	target := filepath.Join(scratch.Dir(t), "target")
	for _, readOnly := range []bool{false, true} {
		if err := errors.Join(hostmount.CheckTarget(target, false), hostmount.MakeTarget(target, false), hostmount.Bind(source, target, readOnly)); err != nil {
			t.Fatal(err)
		}
		m, err := hostmount.At(target)
		if err != nil || m == nil || m.ReadOnly != readOnly {
			t.Errorf("bound is %+v, %v", m, err)
		}
		err = os.WriteFile(filepath.Join(target, "file"), nil, 0o600)
		if readOnly != errors.Is(err, unix.EROFS) {
			t.Errorf("read-only %t, and writing gives %v", readOnly, err)
		}
		if err := errors.Join(hostmount.Clear(context.Background(), target, anything), hostmount.RemoveTarget(target), hostmount.RemoveTarget(target)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestClearTakesOnlyWhatIsOurs(t *testing.T) {
	priv.Root(t)
	dir := scratch.Dir(t)
	scratch.Run(t, "mount", "-t", "tmpfs", "ours", dir)
	scratch.Run(t, "mount", "-t", "ramfs", "theirs", dir)
	ours := func(m *hostmount.Mount) bool { return m.FSType == "tmpfs" }
	if err := hostmount.Clear(context.Background(), dir, ours); err != nil {
		t.Error(err)
	}
	if m, err := hostmount.At(dir); err != nil || m == nil || m.FSType != "ramfs" {
		t.Errorf("what is mounted is %v, %v", m, err)
	}
	if err := hostmount.RemoveTarget(dir); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("removing a mount: %v", err)
	}
	scratch.Run(t, "umount", dir)
	open, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	if err := hostmount.Clear(context.Background(), dir, ours); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("in use: got %v", err)
	}
	_ = open.Close()
	if err := errors.Join(hostmount.Clear(context.Background(), dir, ours), hostmount.Clear(context.Background(), dir, ours)); err != nil {
		t.Error(err)
	}
}

func TestUsageIsNeverThatOfAnotherFilesystem(t *testing.T) {
	dir := t.TempDir()
	for name, path := range map[string]string{"a directory": dir, "nothing": filepath.Join(dir, "none"), "another's mount": "/proc"} {
		if _, err := hostmount.UsageAt(path, func(m *hostmount.Mount) bool { return m.FSType == "ext9" }); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestCheckTarget(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"dir", "full"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{"file": "", "full/entry": "", "text": "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(dir, "dir"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path     string
		file, ok bool
	}{
		"nothing there":                 {"none", false, true},
		"an empty directory":            {"dir", false, true},
		"a directory for a file":        {"dir", true, false},
		"an empty file":                 {"file", true, true},
		"a file for a directory":        {"file", false, false},
		"a file with data":              {"text", true, false},
		"a directory that is not empty": {"full", false, false},
		"a symbolic link":               {"link", false, false},
		"no parent":                     {"none/none", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			err := hostmount.CheckTarget(filepath.Join(dir, c.path), c.file)
			if c.ok && err != nil || !c.ok && !errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestCheckFlags(t *testing.T) {
	for name, c := range map[string]struct {
		flags []string
		ok    bool
	}{
		"none":                   {nil, true},
		"ordinary ones":          {[]string{"noatime", "data=ordered", "ro"}, true},
		"several in one":         {[]string{"noatime,nodev"}, true},
		"an empty one":           {[]string{""}, false},
		"an empty part":          {[]string{"a,,b"}, false},
		"bind":                   {[]string{"bind"}, false},
		"a hidden remount":       {[]string{"noatime,remount"}, false},
		"another loop device":    {[]string{"loop=/dev/loop0"}, false},
		"an offset":              {[]string{"offset=4096"}, false},
		"mkdir":                  {[]string{"X-mount.mkdir"}, false},
		"more than CSI allows":   {[]string{strings.Repeat("a", 4097)}, false},
		"as much as CSI allows":  {[]string{strings.Repeat("a", 4096)}, true},
		"a quoted SELinux label": {[]string{`context="u:r:t:s0"`}, true},
	} {
		t.Run(name, func(t *testing.T) {
			err := hostmount.CheckFlags(c.flags)
			if c.ok && err != nil || !c.ok && !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func FuzzFindMount(f *testing.F) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(table), "27", "/")
	f.Add("1 2 3:4 / / rw - ext4  rw\n", "1", "/")
	f.Fuzz(func(t *testing.T, table, id, path string) {
		m, err := hostmount.FindMount(table, id, path)
		if m != nil && (err != nil || !strings.Contains(table, id)) {
			t.Errorf("got %+v, %v", m, err)
		}
	})
}

func TestFindMountReadsWhatOthersStumbleOver(t *testing.T) {
	const table = "1 0 0:1 / / rw shared:1 - tmpfs  rw\n" + // without a source
		"12 1 7:300 /a\\040b /mnt/with\\040space rw,noatime shared:2 master:1 - ext4 /dev/loop0 ro\n"
	want := hostmount.Mount{Dev: unix.Mkdev(7, 300), Root: "/a\\040b", FSType: "ext4", ReadOnly: true}
	for name, c := range map[string]struct {
		id, path string
		want     *hostmount.Mount
	}{
		"white space":           {"12", "/mnt/with space", &want},
		"not the mount's root":  {"12", "/mnt/with space/dir", nil},
		"an empty source":       {"1", "/", &hostmount.Mount{Dev: unix.Mkdev(0, 1), Root: "/", FSType: "tmpfs"}},
		"a mount that has gone": {"2", "/", nil},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := hostmount.FindMount(table, c.id, c.path)
			if err != nil || (m == nil) != (c.want == nil) || m != nil && *m != *c.want {
				t.Errorf("got %+v, %v, want %+v", m, err, c.want)
			}
		})
	}
}

func TestAFilesystemThatHasShutDownCanBeUnmounted(t *testing.T) {
	priv.Root(t)
	_, device, dir := volume(t, 300<<20)
	if err := (hostmount.Filesystem{Device: device, Target: dir, Type: "xfs"}).Format(t.Context()); err != nil {
		t.Fatal(err)
	}
	scratch.Run(t, "xfs_io", "-x", "-c", "shutdown", dir)
	if m, err := hostmount.At(dir); err != nil || m == nil || m.FSType != "xfs" {
		t.Errorf("got %v, %v", m, err)
	}
	if err := hostmount.Clear(context.Background(), dir, anything); err != nil {
		t.Error(err)
	}
}
