package csiplugin_test

import (
	"os"
	"slices"
	"testing"

	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

// TestPoolStatus looks at sizes, sharing and descent.
func TestPoolStatus(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	write(t, v.file(), make([]byte, 4*mib), 0)
	snap := h.snapshot("s", v.id)
	clone := h.clone("clone", snapshotSource(snap), 0)
	write(t, clone.file(), make([]byte, mib), 0)
	gone := h.create("gone", block(), nil)
	must(t, os.Remove(gone.file()), v.stage())
	_, err := v.deferTo("t", false)
	must(t, err)
	_, err = h.groupSnapshot("g", v.id)
	must(t, err)

	client := poolv1.NewPoolClient(h.conn)
	status, err := client.GetStatus(h.call(), &poolv1.GetStatusRequest{})
	if err != nil || status.GetPool() != h.poolID() || status.GetVolumes() != 3 || status.GetSnapshots() != 2 || status.GetGroups() != 1 ||
		status.GetPromisedBytes() != v.size+clone.size+gone.size || status.GetFreeBytes() <= 0 || status.GetFreeBytes() >= status.GetTotalBytes() || status.GetCanFreeze() {
		t.Errorf("got %v, %v", status, err)
	}
	list, err := client.ListObjects(h.call(), &poolv1.ListObjectsRequest{Extents: true})
	must(t, err)
	objects := map[string]*poolv1.Object{}
	for _, o := range list.GetObjects() {
		objects[o.GetId()] = o
	}
	if o := objects[clone.id]; len(objects) != 5 || o.GetSource() != snap || o.GetSharedBytes() != 3*mib || o.GetAllocatedBytes() < 4*mib || o.GetExtents() < 2 {
		t.Errorf("the clone is %v", o)
	}
	if o := objects[snap]; !o.GetSnapshot() || o.GetSource() != v.id || !slices.Equal(o.GetMadeFromIt(), []string{clone.id}) || o.GetSharedBytes() != 4*mib {
		t.Errorf("the snapshot is %v", o)
	}
	if o := objects[v.id]; o.GetName() != "v" || len(o.GetMadeFromIt()) != 2 || !slices.Equal(o.GetTargets(), []string{h.path("t")}) || o.GetState() != "ready" {
		t.Errorf("the volume is %v", o)
	}
	if o := objects[gone.id]; o.GetState() != "lost" || o.GetAllocatedBytes() != 0 {
		t.Errorf("the lost volume is %v", o)
	}
	must(t, v.undefer("t", false), v.unstage())
}
