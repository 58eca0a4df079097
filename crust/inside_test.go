package crust_test

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestInside(t *testing.T) {
	n := newNode(t)
	target := n.publish("v1", "pod1")
	stats := func(ctx context.Context, id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
		return n.csi().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	}
	expand := func(required, limit int64) (int64, error) {
		resp, err := n.csi().NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: "v1", VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit},
		})
		return resp.GetCapacityBytes(), err
	}
	t.Run("before a sandbox: no stats, and never those of the host", func(t *testing.T) {
		_, err := stats(t.Context(), "v1", target)
		wantKind(t, err, errdefs.ErrUnavailable, "no sandbox has mounted it")
	})
	t.Run("before a sandbox: the device grows, the filesystem when it is mounted", func(t *testing.T) {
		if size, err := expand(96<<20, 0); err != nil || size != 96<<20 {
			t.Errorf("expand: %d, %v", size, err)
		}
	})
	s := n.sandbox("s1", nil)
	resolved, err := s.mount(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	if got := resolved[0].Deferral.SizeBytes; got != 96<<20 {
		t.Errorf("the sandbox is told to expect %d bytes", got)
	}
	t.Run("stats are the guest's", func(t *testing.T) {
		resp, err := stats(t.Context(), "v1", target)
		if err != nil {
			t.Fatal(err)
		}
		u := resp.GetUsage()
		if len(u) != 2 || u[0].GetTotal() != 96<<20 || u[0].GetUsed() != 24<<20 || u[1].GetUnit() != csi.VolumeUsage_INODES || u[1].GetTotal() != 100 {
			t.Errorf("usage %v", u)
		}
	})
	t.Run("of another volume there are none", func(t *testing.T) {
		_, err := stats(t.Context(), "v9", target)
		wantKind(t, err, errdefs.ErrNotFound, "v9")
	})
	t.Run("expansion reaches the guest", func(t *testing.T) {
		if size, err := expand(128<<20, 0); err != nil || size != 128<<20 {
			t.Errorf("expand: %d, %v", size, err)
		}
		if s.size != 128<<20 {
			t.Errorf("the guest sees %d bytes", s.size)
		}
	})
	t.Run("impossible ranges", func(t *testing.T) {
		_, err := expand(-1, 0)
		wantKind(t, err, errdefs.ErrInvalidArgument, "negative")
		_, err = expand(2, 1)
		wantKind(t, err, errdefs.ErrOutOfRange, "limit_bytes")
	})
	t.Run("a hung guest costs its own volume a while and others nothing", func(t *testing.T) {
		other := n.publish("v2", "pod2")
		s2 := n.sandbox("s2", nil)
		if _, err := s2.mount(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		s.hang = true
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		hung := make(chan error, 1)
		go func() { _, err := stats(ctx, "v1", target); hung <- err }()
		if _, err := stats(t.Context(), "v2", other); err != nil {
			t.Errorf("the other volume: %v", err)
		}
		if err := <-hung; status.Code(err) != codes.DeadlineExceeded && status.Code(err) != codes.Unavailable {
			t.Errorf("the hung one: %v", err)
		}
	})
}
