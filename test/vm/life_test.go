package vm_test

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// TestVolumeMovesBetweenSandboxes is the life of a volume: made in one sandbox, found in the next, read in a third.
func TestVolumeMovesBetweenSandboxes(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	whole := t // the files outlive the sandboxes
	images := map[string]string{}
	t.Run("the first sandbox makes the filesystem and writes", func(t *testing.T) {
		m := vm.Start(t)
		for _, fs := range filesystems {
			images[fs] = newImage(whole, usual)
			attach(t, m, fs, images[fs])
			req := request(fs, fs, neverWritten)
			resp := m.Mount(t, req)
			if !resp.GetFormatted() || resp.GetDeviceBytes() != usual {
				t.Errorf("%s: %v", fs, resp)
			}
			again := m.Mount(t, req)
			if !again.GetFormatted() {
				t.Errorf("%s: the same request again says something else: %v", fs, again)
			}
			other := request(fs, fs, neverWritten)
			other.MountFlags = []string{"noatime"}
			if _, err := m.TryMount(t, other); !errors.Is(err, errdefs.ErrAlreadyExists) {
				t.Errorf("%s: another request for the same path: %v", fs, err)
			}
			m.Shell(t, "echo precious > "+mountPath(fs)+"/file")
		}
	})
	t.Run("the second finds it", func(t *testing.T) {
		m := vm.Start(t)
		for _, fs := range filesystems {
			attach(t, m, fs, images[fs])
			// What the storage says is wrong by now; a filesystem that is there is never formatted.
			resp := m.Mount(t, request(fs, fs, neverWritten))
			if resp.GetFormatted() || resp.GetRepaired() {
				t.Errorf("%s: %v", fs, resp)
			}
			if got := m.Run(t, "cat", mountPath(fs)+"/file"); got != "precious" {
				t.Errorf("%s: the file has %q", fs, got)
			}
		}
	})
	t.Run("the third reads it and changes nothing", func(t *testing.T) {
		m := vm.Start(t)
		for _, fs := range filesystems {
			before := digest(t, images[fs])
			m.Attach(t, qemu.Disk{Serial: fs, Path: images[fs], ReadOnly: true})
			req := request(fs, fs, never)
			if _, err := m.TryMount(t, req); !errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Errorf("%s: a writable mount of a read-only device: %v", fs, err)
			}
			req.ReadOnly = true
			m.Mount(t, req)
			if got := m.Run(t, "cat", mountPath(fs)+"/file"); got != "precious" {
				t.Errorf("%s: the file has %q", fs, got)
			}
			if _, _, code := m.Begin(t, "touch", mountPath(fs)+"/new").Wait(); code == 0 {
				t.Errorf("%s: a read-only volume was written", fs)
			}
			if s := m.Stats(t, mountPath(fs)); s.GetAbnormal() {
				t.Errorf("%s: %s", fs, s.GetMessage())
			}
			m.Unmount(t, mountPath(fs))
			m.Detach(t, fs)
			if digest(t, images[fs]) != before {
				t.Errorf("%s: a read-only mount has changed the device", fs)
			}
		}
	})
}
