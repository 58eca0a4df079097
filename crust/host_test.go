package crust_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// hostRequest is for a volume that is not deferred.
func hostRequest(volume, target string) *csi.NodePublishVolumeRequest {
	req := publishRequest(volume, target)
	req.VolumeContext = nil
	return req
}

// mountTmpfs stands for a driver's own mount.
func mountTmpfs(_, target string) error {
	if err := os.Mkdir(target, 0o750); errors.Is(err, os.ErrExist) {
		return nil // it is published already
	} else if err != nil {
		return err
	}
	return unix.Mount("driver", target, "tmpfs", 0, "size=64k")
}

// TestOneWriterAcrossHostAndSandbox: a volume is in a sandbox or in a host mount, never in both.
func TestOneWriterAcrossHostAndSandbox(t *testing.T) {
	n := newNode(t)
	n.driver.OnHost = mountTmpfs
	n.driver.Volume(t, "v1", 1<<20)
	host, sandbox := n.target("runc"), n.target("kata")
	publish := func(req *csi.NodePublishVolumeRequest) error {
		_, err := n.csi().NodePublishVolume(t.Context(), req)
		return err
	}
	if err := publish(hostRequest("v1", host)); err != nil {
		t.Fatal(err)
	}
	t.Run("first the host, then a sandbox", func(t *testing.T) {
		wantKind(t, publish(publishRequest("v1", sandbox)), errdefs.ErrFailedPrecondition, "mounted on the host at "+host)
	})
	t.Run("also after a restart", func(t *testing.T) {
		n.restart()
		wantKind(t, publish(publishRequest("v1", sandbox)), errdefs.ErrFailedPrecondition, "mounted on the host")
	})
	t.Run("at the same path", func(t *testing.T) {
		wantKind(t, publish(publishRequest("v1", host)), errdefs.ErrAlreadyExists, "mounted on the host")
	})
	t.Run("after the host", func(t *testing.T) {
		if err := n.unpublish("v1", host); err != nil {
			t.Fatal(err)
		}
		if err := publish(publishRequest("v1", sandbox)); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("first a sandbox, then the host", func(t *testing.T) {
		n.driver.Calls()
		wantKind(t, publish(hostRequest("v1", host)), errdefs.ErrFailedPrecondition, "deferred to a sandbox at "+sandbox)
		wantKind(t, publish(hostRequest("v1", sandbox)), errdefs.ErrAlreadyExists, "deferred to a sandbox")
		if calls := n.driver.Calls(); len(calls) != 0 {
			t.Errorf("the driver was called: %v", calls)
		}
	})
	t.Run("a host mount that went with a reboot is not in the way", func(t *testing.T) {
		if err := n.unpublish("v1", sandbox); err != nil {
			t.Fatal(err)
		}
		if err := publish(hostRequest("v1", host)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Unmount(host, 0); err != nil {
			t.Fatal(err)
		}
		if err := publish(publishRequest("v1", sandbox)); err != nil {
			t.Error(err)
		}
	})
}

// TestOneWriterByDevice: the same device under another name.
func TestOneWriterByDevice(t *testing.T) {
	n := newNode(t)
	image := n.driver.Volume(t, "v1", 64<<20)
	if err := os.Link(image, filepath.Join(n.driver.Dir, "alias.img")); err != nil {
		t.Fatal(err)
	}
	run(t, "mkfs.ext4", "-q", image)
	n.driver.OnHost = func(device, target string) error {
		if err := os.Mkdir(target, 0o750); err != nil {
			return err
		}
		return exec.Command("mount", "-o", "loop", device, target).Run()
	}
	host, sandbox := n.target("runc"), n.target("kata")
	t.Run("first a sandbox, then the host", func(t *testing.T) {
		if _, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", sandbox)); err != nil {
			t.Fatal(err)
		}
		_, err := n.csi().NodePublishVolume(t.Context(), hostRequest("alias", host))
		wantKind(t, err, errdefs.ErrFailedPrecondition, "deferred to a sandbox as volume v1")
		if _, err := os.Lstat(host); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the host mount was not undone: %v", err)
		}
		if err := n.unpublish("v1", sandbox); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("first the host, then a sandbox", func(t *testing.T) {
		if _, err := n.csi().NodePublishVolume(t.Context(), hostRequest("alias", host)); err != nil {
			t.Fatal(err)
		}
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", sandbox))
		wantKind(t, err, errdefs.ErrFailedPrecondition, "in use on the host, by /dev/loop")
		if err := n.unpublish("alias", host); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("a block device that the host has mounted", func(t *testing.T) {
		loop := strings.TrimSpace(run(t, "losetup", "--find", "--show", image))
		defer run(t, "losetup", "--detach", loop)
		dir := t.TempDir()
		run(t, "mount", loop, dir)
		defer run(t, "umount", dir)
		n.driver.Answer = answerDevice(loop)
		_, err := n.csi().NodePublishVolume(t.Context(), publishRequest("v1", sandbox))
		wantKind(t, err, errdefs.ErrFailedPrecondition, "in use on the host")
	})
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}
