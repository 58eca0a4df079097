package crust_test

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/shim"
)

// liar is a shim that answers what it likes.
type liar struct {
	*sandbox
	stats  *runtimev1.GetVolumeStatsResponse
	expand *runtimev1.ExpandVolumeResponse
}

func (l *liar) GetVolumeStats(context.Context, *runtimev1.GetVolumeStatsRequest) (*runtimev1.GetVolumeStatsResponse, error) {
	return l.stats, nil
}

func (l *liar) ExpandVolume(context.Context, *runtimev1.ExpandVolumeRequest) (*runtimev1.ExpandVolumeResponse, error) {
	return l.expand, nil
}

// TestHostileShim: a shim that was broken into can spoil its own sandbox's volumes, and nothing else.
func TestHostileShim(t *testing.T) {
	n := newNode(t)
	own, other := n.publish("own", "pod1"), n.publish("other", "pod2")
	victim := n.sandbox("victim", nil)
	if _, err := victim.mount(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	l := &liar{}
	l.sandbox = n.sandboxThat("liar", l, nil)
	if _, err := l.mount(t.Context(), own); err != nil {
		t.Fatal(err)
	}
	t.Run("it gets no volume that another sandbox holds", func(t *testing.T) {
		for _, source := range []string{other, other + "/", n.path("pods") + "/../pods/pod2/volumes/kubernetes.io~csi/pv/mount"} {
			if resolved, err := l.client.Resolve(t.Context(), []shim.Mount{{Source: source}}); err == nil && len(resolved) > 0 {
				t.Errorf("resolved %s to %+v", source, resolved)
			}
		}
	})
	t.Run("it cannot speak of it", func(t *testing.T) {
		for _, target := range []string{other, "/nonexistent"} {
			wantKind(t, l.client.Bound(t.Context(), target, nil), errdefs.ErrFailedPrecondition, "has not claimed")
			// What it does not hold it has given back already; nothing happens.
			if err := l.client.Released(t.Context(), target); err != nil {
				t.Error(err)
			}
		}
		wantKind(t, n.unpublish("other", other), errdefs.ErrFailedPrecondition, "victim")
	})
	t.Run("too many mounts", func(t *testing.T) {
		mounts := make([]shim.Mount, 1025)
		_, err := l.client.Resolve(t.Context(), mounts)
		wantKind(t, err, errdefs.ErrInvalidArgument, "1024")
	})
	t.Run("a message without end", func(t *testing.T) {
		if _, err := l.client.Resolve(t.Context(), []shim.Mount{{Source: "/" + strings.Repeat("x", 8<<20)}}); err == nil {
			t.Error("a message of 8 MiB was taken")
		}
	})
	t.Run("impossible stats", func(t *testing.T) {
		for name, usage := range map[string]*runtimev1.VolumeUsage{
			"negative":       {Unit: runtimev1.VolumeUsage_UNIT_BYTES, Total: -1, Used: -1, Available: -1},
			"more than all":  {Unit: runtimev1.VolumeUsage_UNIT_BYTES, Total: 10, Used: math.MaxInt64, Available: math.MaxInt64},
			"a strange unit": {Unit: 77, Total: 1},
		} {
			l.stats = &runtimev1.GetVolumeStatsResponse{Usage: []*runtimev1.VolumeUsage{usage}}
			resp, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "own", VolumePath: own})
			if err == nil {
				t.Errorf("%s: the kubelet is told %v", name, resp)
			}
		}
	})
	t.Run("an expansion that did not happen", func(t *testing.T) {
		l.expand = &runtimev1.ExpandVolumeResponse{DeviceBytes: 1}
		resp, err := n.csi().NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: "own", VolumePath: own, CapacityRange: &csi.CapacityRange{RequiredBytes: 128 << 20},
		})
		if err == nil {
			t.Errorf("the kubelet is told %v", resp)
		}
	})
	t.Run("and the other sandbox has noticed nothing", func(t *testing.T) {
		if _, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "other", VolumePath: other}); err != nil {
			t.Error(err)
		}
		if err := rpc.FromWire(victim.client.Bound(t.Context(), other, nil)); err != nil {
			t.Error(err)
		}
	})
}
