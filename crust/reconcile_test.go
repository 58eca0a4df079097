package crust_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/protocol/csi/deferred"
)

func answerDevice(path string) func(*deferred.DeferredFilesystem) {
	return func(d *deferred.DeferredFilesystem) { d.Device = path }
}

// logged waits for a finding in the log.
func (n *node) logged(kind, path string) {
	n.t.Helper()
	eventually(n.t, "a finding of kind "+kind, func() error {
		for line := range strings.Lines(n.log.String()) {
			if strings.Contains(line, "kind="+kind) && strings.Contains(line, path) {
				return nil
			}
		}
		return errors.New("nothing in the log")
	})
}

func sealed(target string) bool {
	return os.WriteFile(filepath.Join(target, "file"), nil, 0o600) != nil
}

// TestReboot: mounts, sandboxes and /run are gone, records and the kubelet's directories stay.
func TestReboot(t *testing.T) {
	n := newNode(t)
	bound, idle, gone := n.publish("bound", "pod1"), n.publish("idle", "pod2"), n.publish("gone", "pod3")
	p := n.shimProcess("s1", bound, "bound")
	n.stop()
	p.kill()
	p.killVMM()
	for _, target := range []string{bound, idle, gone} {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(n.path("pods", "pod3")); err != nil { // the kubelet cleans up after pods that it no longer knows
		t.Fatal(err)
	}
	n.start()

	t.Run("seals are renewed before anybody asks", func(t *testing.T) {
		for _, target := range []string{bound, idle} {
			eventually(t, "the seal of "+target, func() error {
				if intact, err := seal.Intact(target); err != nil || !intact {
					return fmt.Errorf("intact: %t, error %w", intact, err)
				}
				return nil
			})
			if !sealed(target) {
				t.Errorf("%s is not sealed", target)
			}
		}
	})
	t.Run("a volume whose pod is gone is given back", func(t *testing.T) {
		n.logged("orphaned", gone)
		eventually(t, "the driver to be told", func() error {
			if _, ok := n.driver.Published()[gone]; ok {
				return errors.New("it is still published")
			}
			return nil
		})
	})
	t.Run("the volume of a sandbox of that boot is free, and known to hold data", func(t *testing.T) {
		s := n.sandbox("s2", nil)
		resolved, err := s.mount(t.Context(), bound)
		if err != nil {
			t.Fatal(err)
		}
		if d := resolved[0].Deferral; d.Blankness != 0 {
			t.Errorf("blankness %v", d.Blankness)
		}
	})
}

// TestOrphanThatIsHeld: the directory of a pod vanishes while something has the device open.
func TestOrphanThatIsHeld(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	stop := openIn(t, filepath.Join(n.driver.Dir, "v1.img"))
	n.stop()
	if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(n.path("pods", "pod1")); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.logged("left", target)
	if _, ok := n.driver.Published()[target]; !ok {
		t.Error("the volume was given back while its device is open")
	}
	stop()
	n.restart()
	n.logged("orphaned", target)
}

// TestDriverComesBack: what could not be undone is undone when the driver's socket is there again.
func TestDriverComesBack(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	n.stopDriver()
	err := n.unpublish("v1", target)
	if err == nil {
		t.Fatal("unpublished without the driver")
	}
	n.stopDriver = n.driver.Serve(t, n.path("sp.sock"))
	n.logged("finished", target)
	if _, ok := n.driver.Published()[target]; ok {
		t.Error("it is still published")
	}
	if err := n.unpublish("v1", target); err != nil {
		t.Errorf("the kubelet's retry: %v", err)
	}
}

// TestExpansionIsFinished: the kubelet is told nothing, and never calls again.
func TestExpansionIsFinished(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	s := n.sandbox("s1", nil)
	if _, err := s.mount(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	s.setFail(true)
	_, err := n.csi().NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: "v1", VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 128 << 20},
	})
	if err == nil {
		t.Fatal("the guest has failed, and the expansion has not")
	}
	s.setFail(false)
	n.restart()
	n.logged("finished", target)
	if size := s.deviceSize(); size != 128<<20 {
		t.Errorf("the guest has %d bytes", size)
	}
}
