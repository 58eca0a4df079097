package csiplugin_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/test/priv"
)

// scenario is a call that is killed.
type scenario struct {
	method string
	// prepare brings a new node to where the call can be made.
	prepare func(h *host) *volume
	call    func(v *volume) error
	// giveUp is what a CO calls that does not want any more; nil if there is nothing of that kind.
	giveUp func(v *volume) error
	// places is how many there are at least, lest they be lost.
	places int
}

func staged(c *csi.VolumeCapability) func(h *host) *volume {
	return func(h *host) *volume {
		v := h.create("v", c, nil)
		must(h.t, v.stage())
		return v
	}
}

func published(c *csi.VolumeCapability, targets ...string) func(h *host) *volume {
	return func(h *host) *volume {
		v := staged(c)(h)
		for _, target := range targets {
			must(h.t, v.publish(target))
		}
		return v
	}
}

func deferredWith(data string) func(h *host) *volume {
	return func(h *host) *volume {
		v := staged(mounted("ext4"))(h)
		_, err := v.deferTo("t", false)
		must(h.t, err)
		write(h.t, v.file(), []byte(data), mib)
		return v
	}
}

// withData makes a volume that a filesystem and some data was written to.
func withData(h *host) *volume {
	v := h.create("v", mounted("ext4"), nil)
	write(h.t, v.file(), []byte("data"), mib)
	return v
}

var scenarios = map[string]scenario{
	"create": {
		method:  csi.Controller_CreateVolume_FullMethodName,
		prepare: func(h *host) *volume { return &volume{host: h} },
		call: func(v *volume) error {
			resp, err := v.control.CreateVolume(v.call(), createRequest("new"))
			v.id = resp.GetVolume().GetVolumeId()
			return err
		},
		places: 5,
	},
	"delete": {
		method:  csi.Controller_DeleteVolume_FullMethodName,
		prepare: func(h *host) *volume { return h.create("v", mounted("ext4"), nil) },
		call:    func(v *volume) error { return v.delete() },
		places:  3,
	},
	"expand": {
		method:  csi.Controller_ControllerExpandVolume_FullMethodName,
		prepare: func(h *host) *volume { return h.create("v", mounted("ext4"), nil) },
		call: func(v *volume) error {
			resp, err := v.control.ControllerExpandVolume(v.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 * mib}})
			if err == nil && resp.GetCapacityBytes() != 64*mib {
				return fmt.Errorf("expanded to %d bytes", resp.GetCapacityBytes())
			}
			return err
		},
		places: 3,
	},
	"clone a volume": {
		method:  csi.Controller_CreateVolume_FullMethodName,
		prepare: withData,
		call: func(v *volume) error {
			_, err := v.control.CreateVolume(v.call(), cloneRequest("clone", volumeSource(v.id), 0))
			return err
		},
		places: 6,
	},
	"restore a snapshot to a larger volume": {
		method:  csi.Controller_CreateVolume_FullMethodName,
		prepare: func(h *host) *volume { v := withData(h); v.snap = h.snapshot("s", v.id); return v },
		call: func(v *volume) error {
			_, err := v.control.CreateVolume(v.call(), cloneRequest("clone", snapshotSource(v.snap), 32*mib))
			return err
		},
		places: 6,
	},
	"snapshot": {
		method:  csi.Controller_CreateSnapshot_FullMethodName,
		prepare: withData,
		call: func(v *volume) error {
			_, err := v.control.CreateSnapshot(v.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.id})
			return err
		},
		places: 7,
	},
	"delete a snapshot": {
		method:  csi.Controller_DeleteSnapshot_FullMethodName,
		prepare: func(h *host) *volume { v := withData(h); v.snap = h.snapshot("s", v.id); return v },
		call: func(v *volume) error {
			_, err := v.control.DeleteSnapshot(v.call(), &csi.DeleteSnapshotRequest{SnapshotId: v.snap})
			return err
		},
		places: 3,
	},
	"group snapshot": {
		method: csi.GroupController_CreateVolumeGroupSnapshot_FullMethodName,
		prepare: func(h *host) *volume {
			v := withData(h)
			v.other = h.create("other", mounted("ext4"), nil).id
			return v
		},
		call:   func(v *volume) error { _, err := v.groupSnapshot("g", v.id, v.other); return err },
		places: 9,
	},
	"delete a group snapshot": {
		method: csi.GroupController_DeleteVolumeGroupSnapshot_FullMethodName,
		prepare: func(h *host) *volume {
			v := withData(h)
			v.other = h.create("other", mounted("ext4"), nil).id
			g, err := h.groupSnapshot("g", v.id, v.other)
			must(h.t, err)
			v.snap = g.GetGroupSnapshotId()
			return v
		},
		call: func(v *volume) error {
			_, err := v.group.DeleteVolumeGroupSnapshot(v.call(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: v.snap})
			return err
		},
		places: 4,
	},
	"modify": {
		method:  csi.Controller_ControllerModifyVolume_FullMethodName,
		prepare: func(h *host) *volume { return h.create("v", mounted("ext4"), nil) },
		call: func(v *volume) error {
			_, err := v.control.ControllerModifyVolume(v.call(), &csi.ControllerModifyVolumeRequest{VolumeId: v.id, MutableParameters: map[string]string{csiplugin.ParameterDiscard: "online"}})
			return err
		},
		places: 2,
	},
	"stage": {
		method: csi.Node_NodeStageVolume_FullMethodName,
		prepare: func(h *host) *volume {
			v := h.create("v", mounted("ext4"), nil)
			return v
		},
		call:   func(v *volume) error { return v.stage() },
		giveUp: func(v *volume) error { return v.unstage() },
		places: 1,
	},
	"unstage": {
		method:  csi.Node_NodeUnstageVolume_FullMethodName,
		prepare: staged(mounted("ext4")),
		call:    func(v *volume) error { return v.unstage() },
		places:  2,
	},
	"publish a blank volume": {
		method: csi.Node_NodePublishVolume_FullMethodName, prepare: staged(mounted("ext4")),
		call: func(v *volume) error { return v.publish("t") },
		// Whether there is a filesystem yet may differ. That the next one can publish may not.
		giveUp: func(v *volume) error { return errors.Join(v.unpublish("t"), v.publish("t"), v.unpublish("t")) },
		places: 7,
	},
	"publish a filesystem": {
		method: csi.Node_NodePublishVolume_FullMethodName,
		prepare: func(h *host) *volume {
			v := published(mounted("ext4"), "first")(h)
			must(h.t, os.WriteFile(h.path("first/file"), nil, 0o600), v.unpublish("first"))
			return v
		},
		call:   func(v *volume) error { return v.publish("t") },
		giveUp: func(v *volume) error { return v.unpublish("t") },
		places: 5,
	},
	"publish a second time": {
		method: csi.Node_NodePublishVolume_FullMethodName, prepare: published(mounted("ext4"), "first"),
		call:   func(v *volume) error { return v.publish("t") },
		giveUp: func(v *volume) error { return v.unpublish("t") },
		places: 4,
	},
	"publish a block device": {
		method: csi.Node_NodePublishVolume_FullMethodName, prepare: staged(block()),
		call:   func(v *volume) error { return v.publish("t") },
		giveUp: func(v *volume) error { return v.unpublish("t") },
		places: 5,
	},
	"publish to a sandbox": {
		method: csi.Node_NodePublishVolume_FullMethodName, prepare: staged(mounted("ext4")),
		call: func(v *volume) error {
			fs, err := v.deferTo("t", false)
			if err == nil && (!fs.GetNeverWritten() || fs.GetFormatPolicy() != deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK) {
				return fmt.Errorf("got %v", fs)
			}
			return err
		},
		giveUp: func(v *volume) error { return v.undefer("t", true) },
		places: 1,
	},
	"unpublish the last": {
		method: csi.Node_NodeUnpublishVolume_FullMethodName, prepare: published(mounted("ext4"), "t"),
		call:   func(v *volume) error { return v.unpublish("t") },
		places: 6,
	},
	"unpublish one of two": {
		method: csi.Node_NodeUnpublishVolume_FullMethodName, prepare: published(mounted("ext4"), "first", "t"),
		call:   func(v *volume) error { return v.unpublish("t") },
		places: 5,
	},
	"unpublish a block device": {
		method: csi.Node_NodeUnpublishVolume_FullMethodName, prepare: published(block(), "t"),
		call:   func(v *volume) error { return v.unpublish("t") },
		places: 6,
	},
	"unpublish from a sandbox and erase": {
		method: csi.Node_NodeUnpublishVolume_FullMethodName, prepare: deferredWith("fragment"),
		call:   func(v *volume) error { return v.undefer("t", true) },
		places: 4,
	},
	"unpublish from a sandbox and keep": {
		method: csi.Node_NodeUnpublishVolume_FullMethodName, prepare: deferredWith("data"),
		call:   func(v *volume) error { return v.undefer("t", false) },
		places: 3,
	},
}

// TestEveryCallSurvivesAKill kills the plugin between any two steps of each call, starts it again, and lets the CO repeat
// the call, or give up. In the end the world is as if nothing had happened.
func TestEveryCallSurvivesAKill(t *testing.T) {
	priv.Root(t)
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pools := scratch.Filesystem(t, "xfs", 2*gib)
			want := s.run(t, filepath.Join(pools, "undisturbed"), -1, -1, s.call).world
			var gone world
			if s.giveUp != nil {
				gone = s.run(t, filepath.Join(pools, "given-up"), -1, -1, s.giveUp).world
			}
			for at := 0; ; at++ {
				got := s.run(t, filepath.Join(pools, fmt.Sprint("repeated-", at)), at, -1, s.call)
				if got.place == "" {
					if at < s.places {
						t.Errorf("there are only %d places, there were %d", at, s.places)
					}
					return
				}
				if diff := cmp.Diff(want, got.world); diff != "" {
					t.Errorf("killed at %q and repeated:\n%s", got.place, diff)
				}
				if s.giveUp == nil {
					continue
				}
				got = s.run(t, filepath.Join(pools, fmt.Sprint("given-up-", at)), at, -1, s.giveUp)
				if diff := cmp.Diff(gone, got.world); diff != "" {
					t.Errorf("killed at %q and given up:\n%s", got.place, diff)
				}
			}
		})
	}
}

// TestEveryStartSurvivesAKill kills the plugin in a call, and then the next one while it finishes what was left undone.
func TestEveryStartSurvivesAKill(t *testing.T) {
	priv.Root(t)
	for _, name := range []string{"create", "delete", "expand", "clone a volume", "snapshot", "group snapshot", "delete a group snapshot", "publish a blank volume", "unpublish the last", "unpublish from a sandbox and erase"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := scenarios[name]
			pools := scratch.Filesystem(t, "xfs", 2*gib)
			want := s.run(t, filepath.Join(pools, "undisturbed"), -1, -1, s.call).world
			died := 0
			for at := 0; at < s.places; at++ {
				for start := 0; ; start++ {
					got := s.run(t, filepath.Join(pools, fmt.Sprint(at, "-", start)), at, start, s.call)
					if diff := cmp.Diff(want, got.world); diff != "" {
						t.Errorf("killed at %q, and starting at %q:\n%s", got.place, got.second, diff)
					}
					if got.second == "" {
						break
					}
					died++
				}
			}
			if died == 0 {
				t.Error("no start had anything to finish")
			}
		})
	}
}

type outcome struct {
	place, second string
	world         world
}

// run makes the scenario's call in a process that is killed in its at-th place, lets another one start that is killed in
// its start-th place, if it is not negative, and then lets a third one do next.
func (s scenario) run(t *testing.T, pool string, at, start int, next func(*volume) error) outcome {
	t.Helper()
	h := newHostIn(t, pool)
	v := s.prepare(h)
	h.stop()
	end := h.startChild(s.method, at)
	err := s.call(v)
	place := end()
	if place == "" {
		must(t, err)
	} else {
		wantCode(t, err, codes.Unavailable)
	}
	second := ""
	if start >= 0 {
		second = h.runChildStart(start)
	}
	h.start()
	if err := next(v); err != nil {
		t.Fatalf("killed at %q, and starting at %q: %v", place, second, err)
	}
	h.stop()
	w := h.world()
	h.start()
	s.cleanUp(t, h, v)
	return outcome{place, second, w}
}

// cleanUp goes the way of a CO that has finished with the volume, and checks that nothing is left.
func (s scenario) cleanUp(t *testing.T, h *host, v *volume) {
	t.Helper()
	if v.cap != nil {
		for _, target := range []string{"t", "first"} {
			must(t, ignoreNotFound(v.unpublish(target)))
		}
		must(t, ignoreNotFound(v.unstage()))
	}
	if v.id != "" {
		must(t, v.delete())
	}
	h.deleteAll()
	if got := slices.Concat(h.mounts(), h.devices(), h.objects()); len(got) > 0 {
		t.Errorf("left behind are %v", got)
	}
	h.stop()
}

func ignoreNotFound(err error) error {
	if err != nil && strings.Contains(err.Error(), codes.NotFound.String()) {
		return nil
	}
	return err
}

// world is what there is on a node, without what differs from one run to the next.
type world struct {
	Volumes []string
	Objects []string
	Mounts  []string
	Devices int
	Targets []string
}

// world describes a node whose plugin has stopped.
func (h *host) world() world {
	h.t.Helper()
	w := world{Devices: len(h.devices())}
	c, err := catalog.Open(filepath.Join(h.root(), "catalog.db"))
	must(h.t, err)
	all, err := c.Volumes()
	must(h.t, err)
	for _, v := range all {
		n, err := c.Node(v.ID)
		must(h.t, err)
		text := fmt.Sprintf("%s %s size %d expanding %d fs %q formatting %t mutable %v cloned %t", v.Name, v.State, v.Size, v.Expanding, v.FSType, n.Formatting, v.Mutable, v.Source != "")
		if n.Staged != nil {
			text += " staged"
		}
		for _, target := range slices.Sorted(maps.Keys(n.Publishes)) {
			p := n.Publishes[target]
			text += fmt.Sprintf(" [%s %s %s never written %t erase %t]", filepath.Base(target), p.Kind, p.State, p.NeverWritten, p.Erase)
		}
		w.Volumes = append(w.Volumes, text)
	}
	snapshots, err := c.SnapshotsAfter("", nil, 0)
	must(h.t, err)
	for _, s := range snapshots {
		w.Volumes = append(w.Volumes, fmt.Sprintf("snapshot %q %s size %d in a group %t", s.Name, s.State, s.Size, s.Group.Kind() != ""))
	}
	groups, err := c.Groups()
	must(h.t, err)
	for _, g := range groups {
		w.Volumes = append(w.Volumes, fmt.Sprintf("group %q %s of %d", g.Name, g.State, len(g.Members)))
	}
	slices.Sort(w.Volumes)
	must(h.t, c.Close())
	for _, name := range h.objects() {
		info, err := os.Stat(h.file(name))
		must(h.t, err)
		kind := "object"
		if strings.HasPrefix(name, ".") {
			kind = "unfinished object"
		}
		w.Objects = append(w.Objects, fmt.Sprintf("%s of %d bytes, blank %t", kind, info.Size(), blank(h.t, h.file(name))))
	}
	slices.Sort(w.Objects)
	for _, path := range h.mounts() {
		m, err := hostmount.At(path)
		must(h.t, err)
		name := filepath.Base(path)
		if strings.HasPrefix(name, "stage-") {
			name = "stage"
		}
		w.Mounts = append(w.Mounts, fmt.Sprintf("%s %s read-only %t", name, m.FSType, m.ReadOnly))
	}
	slices.Sort(w.Mounts)
	for _, name := range []string{"t", "first"} {
		if _, err := os.Lstat(h.path(name)); err == nil {
			w.Targets = append(w.Targets, name)
		}
	}
	return w
}
