package crust_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/crust/internal/sptest"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/shim"
)

func TestClaim(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	s1 := n.sandbox("s1", nil)

	t.Run("what is no deferral is left out", func(t *testing.T) {
		resolved, err := s1.mount(t.Context(), "/etc", "proc", target+"x", filepath.Dir(target))
		if err != nil || len(resolved) != 0 {
			t.Errorf("resolved %v, %v", resolved, err)
		}
	})
	t.Run("a deferral is described in full", func(t *testing.T) {
		resolved, err := s1.mount(t.Context(), "/etc", target)
		if err != nil {
			t.Fatal(err)
		}
		device, err := filepath.EvalSymlinks(filepath.Join(n.driver.Dir, "v1.img"))
		if err != nil {
			t.Fatal(err)
		}
		want := []shim.Resolved{{Index: 1, Deferral: runtimehandler.Deferral{
			Driver: sptest.Name, VolumeID: "v1", TargetPath: target, Device: device, Serial: runtimehandler.Serial(sptest.Name, "v1"),
			SizeBytes: 64 << 20, FSType: "ext4", Format: true, Blankness: runtimehandler.BlanknessNeverWritten,
		}}}
		if diff := cmp.Diff(want, resolved); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
	})
	t.Run("once mounted it may hold data", func(t *testing.T) {
		resolved, err := s1.mount(t.Context(), filepath.Join(target, "sub", "dir"))
		if err != nil {
			t.Fatal(err)
		}
		if got := resolved[0]; got.SubPath != "sub/dir" || got.Deferral.Blankness != runtimehandler.BlanknessUnknown {
			t.Errorf("resolved %+v", got)
		}
	})
	t.Run("another sandbox does not get it, and nothing else either", func(t *testing.T) {
		other := n.publish("v2", "pod2")
		s2 := n.sandbox("s2", nil)
		_, err := s2.mount(t.Context(), other, target)
		wantKind(t, err, errdefs.ErrFailedPrecondition, "held by sandbox s1")
		s3 := n.sandbox("s3", nil)
		if _, err := s3.mount(t.Context(), other); err != nil {
			t.Errorf("the other volume was claimed: %v", err)
		}
	})
	t.Run("it is not given back while the sandbox lives", func(t *testing.T) {
		wantKind(t, n.unpublish("v1", target), errdefs.ErrFailedPrecondition, "held by sandbox s1")
		_, err := n.csi().NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "v1", StagingTargetPath: "/s"})
		wantKind(t, err, errdefs.ErrFailedPrecondition, "still published")
		if err := s1.client.Released(t.Context(), target); err != nil {
			t.Fatal(err)
		}
		if err := n.unpublish("v1", target); err != nil {
			t.Error(err)
		}
		if ext := n.driver.Unpublished(); len(ext) != 1 || !ext[0].GetDeferFsOps() || ext[0].GetNeverMounted() {
			t.Errorf("the driver was told %v", ext)
		}
	})
	t.Run("a sandbox that lacks an ability", func(t *testing.T) {
		i := 0
		for what, change := range map[string]func(*shim.Sandbox){
			"a filesystem to be made":          func(s *shim.Sandbox) { s.Capabilities.Format = false },
			"has filesystem ext4":              func(s *shim.Sandbox) { s.FSTypes = []string{"xfs"} },
			"a sub-directory to be mounted":    func(s *shim.Sandbox) { s.Capabilities.SubPath = false },
			"its files to be given to a group": func(s *shim.Sandbox) { s.Capabilities.Group = false },
		} {
			n.driver.Volume(t, "poor", 1<<20)
			target := n.target("poor")
			req := publishRequest("poor", target)
			req.VolumeCapability.GetMount().VolumeMountGroup = "7"
			if _, err := n.csi().NodePublishVolume(t.Context(), req); err != nil {
				t.Fatal(err)
			}
			i++
			s := n.sandbox(fmt.Sprintf("poor%d", i), change)
			_, err := s.mount(t.Context(), filepath.Join(target, "sub"))
			wantKind(t, err, errdefs.ErrFailedPrecondition, what)
			s.client.Close()
			if err := n.unpublish("poor", target); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestRegister(t *testing.T) {
	n := newNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for name, change := range map[string]func(*shim.Sandbox){
		"sandbox_id": func(s *shim.Sandbox) { s.ID = "../x" },
		"runtime":    func(s *shim.Sandbox) { s.Runtime = "" },
		"address":    func(s *shim.Sandbox) { s.Address = "x.sock" },
		"fs_types":   func(s *shim.Sandbox) { s.FSTypes = nil },
		"vmm_pid":    func(s *shim.Sandbox) { s.VMMPID = -1 },
	} {
		config := fullSandbox("s", "/x.sock")
		change(&config)
		_, err := shim.Connect(ctx, n.path("rt.sock"), config, n.config.Log)
		wantKind(t, err, errdefs.ErrInvalidArgument, name)
	}
	_, err := shim.Connect(ctx, n.path("rt.sock"), fullSandbox("elsewhere", n.path("elsewhere.sock")), n.config.Log)
	wantKind(t, err, errdefs.ErrFailedPrecondition, "beneath /run/crust")
	n.publish("v1", "pod")
	p := n.shimProcess("taken", n.target("pod"), "claim")
	n.sandbox("other", nil)
	_, err = shim.Connect(ctx, n.path("rt.sock"), fullSandbox("taken", n.path("other.sock")), n.config.Log)
	wantKind(t, err, errdefs.ErrAlreadyExists, "alive")
	p.kill()
	p.killVMM()
}

func TestShimDies(t *testing.T) {
	n := newNode(t)
	t.Run("with its VMM, before it has mounted: at most half a filesystem is there", func(t *testing.T) {
		target := n.publish("v1", "pod1")
		p := n.shimProcess("s1", target, "claim")
		wantKind(t, n.unpublish("v1", target), errdefs.ErrFailedPrecondition, "held by sandbox s1")
		p.kill()
		p.killVMM()
		s := n.sandbox("s1b", nil)
		var resolved []shim.Resolved
		eventually(t, "the volume to be free", func() (err error) {
			resolved, err = s.client.Resolve(t.Context(), []shim.Mount{{Source: target}})
			return err
		})
		if got := resolved[0].Deferral.Blankness; got != runtimehandler.BlanknessUnfinishedFormat {
			t.Errorf("blankness %v", got)
		}
		if err := s.client.Released(t.Context(), target); err != nil {
			t.Fatal(err)
		}
		if err := n.unpublish("v1", target); err != nil {
			t.Fatal(err)
		}
		if ext := n.driver.Unpublished(); !ext[len(ext)-1].GetNeverMounted() {
			t.Errorf("the driver was told %v", ext)
		}
	})
	t.Run("and its VMM lives on: the volume stays held", func(t *testing.T) {
		target := n.publish("v2", "pod2")
		p := n.shimProcess("s2", target, "bound")
		p.kill()
		eventually(t, "the daemon to notice", func() error {
			if !strings.Contains(n.log.String(), "still holds volumes") {
				return errors.New("nothing in the log")
			}
			return nil
		})
		wantKind(t, n.unpublish("v2", target), errdefs.ErrFailedPrecondition, "held by sandbox s2")
		p.killVMM()
		eventually(t, "unpublish", func() error { return n.unpublish("v2", target) })
	})
	t.Run("and somebody else has the device open", func(t *testing.T) {
		target := n.publish("v3", "pod3")
		p := n.shimProcess("s3", target, "bound")
		holder := openIn(t, filepath.Join(n.driver.Dir, "v3.img"))
		p.kill()
		p.killVMM()
		eventually(t, "the daemon to see the holder", func() error {
			err := n.unpublish("v3", target)
			if err == nil {
				t.Fatal("the volume was given back")
			}
			if !strings.Contains(err.Error(), "still open in sleep") {
				return err
			}
			return nil
		})
		holder()
		eventually(t, "unpublish", func() error { return n.unpublish("v3", target) })
	})
	t.Run("while no daemon runs", func(t *testing.T) {
		target := n.publish("v4", "pod4")
		p := n.shimProcess("s4", target, "bound")
		n.stop()
		p.kill()
		p.killVMM()
		n.start()
		eventually(t, "unpublish", func() error { return n.unpublish("v4", target) })
	})
}

func TestShimOutlivesTheDaemon(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	s := n.sandbox("s1", nil)
	if _, err := s.mount(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	n.restart()
	wantKind(t, n.unpublish("v1", target), errdefs.ErrFailedPrecondition, "held by sandbox s1")
	stats, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v1", VolumePath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() != 64<<20 {
		t.Errorf("stats after the restart: %v, %v", stats, err)
	}
	if err := s.client.Released(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	if err := n.unpublish("v1", target); err != nil {
		t.Error(err)
	}
}
