package vm_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// TestNothingIsFormattedOverData holds the agent to the rule that a filesystem is made only where it is known that there
// is no data: not over what is recognised, not over what is not, and not because the storage says so if the device
// contradicts it.
func TestNothingIsFormattedOverData(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	all := slices.Concat(contents, []content{
		{"ext4 where XFS is wanted", usual, func(t *testing.T, path string) { mustHost(t, "mkfs.ext4", "-q", path) }, "ext4"},
		{"XFS where ext4 is wanted", usual, func(t *testing.T, path string) { mustHost(t, "mkfs.xfs", "-q", path) }, "xfs"},
	})
	for _, c := range all {
		t.Run(c.name, func(t *testing.T) {
			path := newImage(t, c.size)
			c.write(t, path)
			before := digest(t, path)
			const serial = "data"
			attach(t, m, serial, path)
			for _, fs := range filesystems {
				if c.says == fs {
					continue // what is there is what is wanted
				}
				for _, policy := range []guestv1.FormatPolicy{never, neverWritten} {
					_, err := m.TryMount(t, request(serial, fs, policy))
					refused(t, err, serial, c.says)
				}
			}
			// An unfinished mkfs leaves bytes that nobody recognises, but nothing that another tool has made.
			if !strings.HasPrefix(c.says, "offset") && c.says != "ext4" {
				_, err := m.TryMount(t, request(serial, "ext4", unfinished))
				refused(t, err, serial, c.says)
			}
			remove(t, m, serial)
			if digest(t, path) != before {
				t.Error("the device has changed")
			}
		})
	}
	t.Run("a blank device without a word of the storage", func(t *testing.T) {
		path := newImage(t, usual)
		attach(t, m, "blank", path)
		_, err := m.TryMount(t, request("blank", "ext4", never))
		refused(t, err, "blank", "nothing but zeros")
		if blocks(t, path) != 0 {
			t.Error("the device was written")
		}
	})
	t.Run("a blank device that is read-only", func(t *testing.T) {
		path := newImage(t, usual)
		m.Attach(t, qemu.Disk{Serial: "blank", Path: path, ReadOnly: true})
		defer m.Detach(t, "blank")
		req := request("blank", "ext4", neverWritten)
		req.ReadOnly = true
		_, err := m.TryMount(t, req)
		refused(t, err, "blank", "read-write")
	})
	for fs, least := range map[string]int64{"ext4": 16 * mib, "xfs": 300 * mib} {
		t.Run("a device that is too small for "+fs, func(t *testing.T) {
			path := newImage(t, least-4096)
			attach(t, m, "small", path)
			for _, policy := range []guestv1.FormatPolicy{neverWritten, unfinished} {
				_, err := m.TryMount(t, request("small", fs, policy))
				if !errors.Is(err, errdefs.ErrOutOfRange) || !strings.Contains(err.Error(), "at least") {
					t.Errorf("error %v", err)
				}
			}
			remove(t, m, "small")
			if blocks(t, path) != 0 {
				t.Error("the device was written")
			}
			grow(t, path, least)
			attach(t, m, "small", path)
			m.Mount(t, request("small", fs, neverWritten))
			if options := m.Run(t, "findmnt", "-no", "FSTYPE", mountPath("small")); options != fs {
				t.Errorf("mounted is %q", options)
			}
		})
	}
}

// refused checks that a mount was refused for what was found, with the volume and the cure in the text.
func refused(t *testing.T, err error, serial, says string) {
	t.Helper()
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("error %v, want a failed precondition", err)
		return
	}
	for _, want := range []string{"volume " + serial, says} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error %q does not have %q", err, want)
		}
	}
}
