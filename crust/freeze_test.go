package crust_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	"crust.dev/crust/crust/internal/sptest"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
)

// freezer is a shim whose guest can freeze, and thaws by itself.
type freezer struct {
	*sandbox
	refuse error

	mu     sync.Mutex
	frozen bool
	limit  time.Duration
}

func (f *freezer) FreezeVolume(_ context.Context, req *runtimev1.FreezeVolumeRequest) (*runtimev1.FreezeVolumeResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return nil, f.refuse
	}
	f.frozen, f.limit = true, req.GetTimeLimit().AsDuration()
	return &runtimev1.FreezeVolumeResponse{}, nil
}

func (f *freezer) ThawVolume(context.Context, *runtimev1.ThawVolumeRequest) (*runtimev1.ThawVolumeResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frozen = false
	return &runtimev1.ThawVolumeResponse{}, nil
}

func (f *freezer) state() (bool, time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.frozen, f.limit
}

func TestFreeze(t *testing.T) {
	n := newNode(t)
	conn, err := rpc.Dial(n.path("kep.sock"))
	check(t, "dial", err)
	defer conn.Close()
	service := runtimev1.NewConsistencyClient(conn)
	freeze := func(limit time.Duration, ids ...string) (*runtimev1.FreezeVolumesResponse, error) {
		return service.FreezeVolumes(t.Context(), &runtimev1.FreezeVolumesRequest{Driver: sptest.Name, VolumeIds: ids, TimeLimit: durationpb.New(limit)})
	}
	thaw := func(ids ...string) error {
		_, err := service.ThawVolumes(t.Context(), &runtimev1.ThawVolumesRequest{Driver: sptest.Name, VolumeIds: ids})
		return err
	}
	guests := map[string]*freezer{}
	for _, id := range []string{"a", "b"} {
		f := &freezer{}
		f.sandbox = n.sandboxThat(id, f, nil)
		_, err := f.mount(t.Context(), n.publish(id, "pod-"+id))
		check(t, "mount", err)
		guests[id] = f
	}
	n.publish("idle", "pod-idle")
	frozen := func() []string {
		var list []string
		for id, f := range guests {
			if is, _ := f.state(); is {
				list = append(list, id)
			}
		}
		slices.Sort(list)
		return list
	}
	t.Run("all that are mounted", func(t *testing.T) {
		resp, err := freeze(5*time.Second, "a", "idle", "b")
		check(t, "freeze", err)
		if !slices.Equal(resp.GetFrozen(), []string{"a", "b"}) || !slices.Equal(resp.GetNotMounted(), []string{"idle"}) || !slices.Equal(frozen(), []string{"a", "b"}) {
			t.Errorf("answer %v; frozen %v", resp, frozen())
		}
		if _, limit := guests["a"].state(); limit != 5*time.Second {
			t.Errorf("the guest thaws by itself after %v", limit)
		}
		check(t, "thaw", thaw("a", "b"))
		if left := frozen(); len(left) > 0 {
			t.Errorf("still frozen: %v", left)
		}
	})
	t.Run("or none", func(t *testing.T) {
		guests["b"].mu.Lock()
		guests["b"].refuse = errdefs.ErrFailedPrecondition
		guests["b"].mu.Unlock()
		_, err := freeze(5*time.Second, "a", "b")
		wantKind(t, err, errdefs.ErrFailedPrecondition, "volume b")
		if left := frozen(); len(left) > 0 {
			t.Errorf("still frozen: %v", left)
		}
	})
	t.Run("bad requests", func(t *testing.T) {
		for what, call := range map[string]func() error{
			"time_limit":  func() error { _, err := freeze(0, "a"); return err },
			"at most":     func() error { _, err := freeze(time.Hour, "a"); return err },
			"one twice":   func() error { _, err := freeze(time.Second, "a", "a"); return err },
			"0 volume_id": func() error { _, err := freeze(time.Second); return err },
			"1 to 256":    func() error { return thaw() },
		} {
			wantKind(t, call(), errdefs.ErrInvalidArgument, what)
		}
	})
	t.Run("a volume that has left its sandbox meanwhile is not claimed to be consistent", func(t *testing.T) {
		_, err := freeze(5*time.Second, "a")
		check(t, "freeze", err)
		check(t, "release", guests["a"].client.Released(t.Context(), n.target("pod-a")))
		wantKind(t, thaw("a"), errdefs.ErrFailedPrecondition, "in no sandbox")
	})
}
