package vm_test

import (
	"bufio"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// TestGuestDiesWhileWriting kills QEMU under a writer on each filesystem. The next sandbox checks, mounts, and finds
// everything that the writer was told is on the disk.
func TestGuestDiesWhileWriting(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	images, acknowledged := map[string]string{}, map[string]int{}
	whole := t
	t.Run("the first dies", func(t *testing.T) {
		m := vm.Start(t, func(c *qemu.Config) { c.CPUs = 2 })
		writers := map[string]*vm.Command{}
		for _, fs := range filesystems {
			images[fs] = newImage(whole, usual)
			m.Attach(t, qemu.Disk{Serial: fs, Path: images[fs]})
			m.Mount(t, request(fs, fs, neverWritten))
			writers[fs] = m.Begin(t, vm.ToolPath, "write", mountPath(fs)+"/records")
		}
		for _, fs := range filesystems {
			acknowledged[fs] = lastNumber(writers[fs].ReadUntil("20\n"))
		}
		m.Kill()
	})
	t.Run("a read-only sandbox is told what to do", func(t *testing.T) {
		m := vm.Start(t)
		for _, fs := range filesystems {
			before := digest(t, images[fs])
			m.Attach(t, qemu.Disk{Serial: fs, Path: images[fs], ReadOnly: true})
			req := request(fs, fs, never)
			req.ReadOnly = true
			if _, err := m.TryMount(t, req); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "read-write once") {
				t.Errorf("%s: %v", fs, err)
			}
			m.Detach(t, fs)
			if digest(t, images[fs]) != before {
				t.Errorf("%s: the device has changed", fs)
			}
		}
	})
	t.Run("the next finds everything", func(t *testing.T) {
		m := vm.Start(t)
		for _, fs := range filesystems {
			m.Attach(t, qemu.Disk{Serial: fs, Path: images[fs]})
			if resp := m.Mount(t, request(fs, fs, never)); resp.GetFormatted() {
				t.Errorf("%s: %v", fs, resp)
			}
			found := lastNumber(m.Run(t, vm.ToolPath, "verify", mountPath(fs)+"/records") + "\n")
			if found < acknowledged[fs] || acknowledged[fs] < 20 {
				t.Errorf("%s: %d records were on the disk, %d are there", fs, acknowledged[fs], found)
			}
			m.Unmount(t, mountPath(fs))
			m.Detach(t, fs)
		}
	})
	mustHost(t, "e2fsck", "-fn", images["ext4"])
	mustHost(t, "xfs_repair", "-n", images["xfs"])
}

// lastNumber returns the last whole line, a number.
func lastNumber(text string) int {
	last := 0
	for s := bufio.NewScanner(strings.NewReader(text[:strings.LastIndex(text, "\n")+1])); s.Scan(); {
		if n, err := strconv.Atoi(s.Text()); err == nil {
			last = n
		}
	}
	return last
}

// TestInterruptedFormat kills QEMU while mkfs runs. What is left is refused as a device that was
// never written, and becomes a filesystem for a caller who knows that no data can be there.
func TestInterruptedFormat(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			path := newImage(t, 4<<30)
			m := vm.Start(t)
			m.Attach(t, qemu.Disk{Serial: "format", Path: path})
			ended := make(chan error, 1)
			go func() {
				_, err := m.Agent().MountVolume(vm.Context(t), request("format", fs, neverWritten))
				ended <- rpc.FromWire(err)
			}()
			for blocks(t, path) == 0 { // until the first byte of it is there
				select {
				case err := <-ended:
					t.Fatalf("the mount ended before a byte was written: %v", err)
				case <-time.After(time.Millisecond):
				}
			}
			m.Kill()
			if err := <-ended; !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("the interrupted call: %v", err)
			}
			blkid, _ := host(t, "blkid", "-p", path)
			t.Logf("left behind: %d KiB, %s", blocks(t, path)/2, blkid)

			m = vm.Start(t)
			attach(t, m, "format", path)
			resp := m.Mount(t, request("format", fs, unfinished))
			if !resp.GetFormatted() && !resp.GetChecked() {
				t.Errorf("mount: %v", resp)
			}
			m.Shell(t, "echo x > "+mountPath("format")+"/file")
			m.Unmount(t, mountPath("format"))
			// The same once more, as after a crash between the mount and its report: what is whole is used.
			if resp := m.Mount(t, request("format", fs, unfinished)); resp.GetFormatted() || !resp.GetChecked() {
				t.Errorf("mount of a whole one: %v", resp)
			}
			if got := m.Run(t, "cat", mountPath("format")+"/file"); got != "x" {
				t.Errorf("the file has %q", got)
			}
		})
	}
}

// TestUnfinishedFormats are the states in which an interrupted mkfs can leave a device, made by hand.
func TestUnfinishedFormats(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	for _, tc := range []struct {
		name, fs  string
		leave     func(path string)
		formatted bool
	}{
		{"nothing", "ext4", func(string) {}, true},
		{"nothing", "xfs", func(string) {}, true},
		{"ext4 without its superblock", "ext4", func(path string) {
			mustHost(t, "mkfs.ext4", "-q", path)
			put(t, path, 1024, make([]byte, 1024))
		}, true},
		{"ext4 without its group descriptors", "ext4", func(path string) {
			mustHost(t, "mkfs.ext4", "-q", "-b", "4096", path)
			put(t, path, 4096, make([]byte, 4096))
		}, true},
		{"XFS with the mark of an unfinished mkfs", "xfs", func(path string) {
			mustHost(t, "mkfs.xfs", "-q", path)
			put(t, path, 126, []byte{1}) // sb_inprogress
		}, true},
		{"XFS without its superblock", "xfs", func(path string) {
			mustHost(t, "mkfs.xfs", "-q", path)
			put(t, path, 0, make([]byte, 512))
		}, true},
		{"a whole ext4", "ext4", func(path string) { mustHost(t, "mkfs.ext4", "-q", path) }, false},
		{"a whole XFS", "xfs", func(path string) { mustHost(t, "mkfs.xfs", "-q", path) }, false},
	} {
		t.Run(tc.name+"/"+tc.fs, func(t *testing.T) {
			path := newImage(t, usual)
			tc.leave(path)
			attach(t, m, "left", path)
			resp := m.Mount(t, request("left", tc.fs, unfinished))
			if resp.GetFormatted() != tc.formatted {
				t.Errorf("mount: %v", resp)
			}
			remove(t, m, "left")
			check := []string{"xfs_repair", "-n", path}
			if tc.fs == "ext4" {
				check = []string{"e2fsck", "-fn", path}
			}
			mustHost(t, check...)
		})
	}
}

// TestStopWritesEverything stops a sandbox whose volumes are in use, as a pod's end does.
func TestStopWritesEverything(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	images := map[string]string{}
	for _, fs := range filesystems {
		images[fs] = newImage(t, usual)
		m.Attach(t, qemu.Disk{Serial: fs, Path: images[fs]})
		m.Mount(t, request(fs, fs, neverWritten))
		m.Shell(t, "echo "+fs+" > "+mountPath(fs)+"/file")
	}
	// A command, a daemon that has left its group, a frozen filesystem, and a volume within another.
	m.Begin(t, vm.ToolPath, "hold", mountPath("xfs")+"/file").ReadUntil("held")
	m.Shell(t, "setsid sh -c 'cd "+mountPath("ext4")+"; exec sleep 1000' > /dev/null 2>&1 &")
	if err := tryBind(t, m, "xfs", "", "/data", false); err != nil {
		t.Fatal(err)
	}
	if err := tryBind(t, m, "ext4", "", "/data/inner", false); err != nil {
		t.Fatal(err)
	}
	if err := freezeFor(t, m, "ext4", time.Minute); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := timeout(t, vm.Timeout)
	defer cancel()
	if err := m.Stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
	if out := mustHost(t, "debugfs", "-R", "cat /file", images["ext4"]); !strings.Contains(out, "ext4") {
		t.Errorf("the file has %q", out)
	}
	if out := mustHost(t, "dumpe2fs", "-h", images["ext4"]); strings.Contains(out, "needs_recovery") || !strings.Contains(out, "has_journal") {
		t.Errorf("ext4 was not unmounted: %s", out)
	}
	mustHost(t, "xfs_repair", "-n", images["xfs"])
}

func freezeFor(t *testing.T, m *vm.Machine, serial string, limit time.Duration) error {
	t.Helper()
	_, err := m.Agent().FreezeVolume(vm.Context(t), &guestv1.FreezeVolumeRequest{MountPath: mountPath(serial), TimeLimit: durationpb.New(limit)})
	return rpc.FromWire(err)
}
