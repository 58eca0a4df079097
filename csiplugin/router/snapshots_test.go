package router_test

import (
	"context"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"crust.dev/crust/test/halt"
)

// call is one that an end answers.
type call func(clients) (proto.Message, error)

func createSnapshot(t *testing.T, req *csi.CreateSnapshotRequest) call {
	return func(to clients) (proto.Message, error) { return to.control.CreateSnapshot(t.Context(), req) }
}

func deleteSnapshot(t *testing.T, id string) call {
	return func(to clients) (proto.Message, error) {
		return to.control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	}
}

func getSnapshot(t *testing.T, id string) call {
	return func(to clients) (proto.Message, error) {
		return to.control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	}
}

func listSnapshots(t *testing.T, req *csi.ListSnapshotsRequest) call {
	return func(to clients) (proto.Message, error) { return to.control.ListSnapshots(t.Context(), req) }
}

func createGroup(t *testing.T, name string, volumes ...string) call {
	return func(to clients) (proto.Message, error) {
		return to.groups.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: volumes})
	}
}

func deleteGroup(t *testing.T, id string, snapshots ...string) call {
	return func(to clients) (proto.Message, error) {
		return to.groups.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: snapshots})
	}
}

func getGroup(t *testing.T, id string, snapshots ...string) call {
	return func(to clients) (proto.Message, error) {
		return to.groups.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: snapshots})
	}
}

// sameAs checks that the router and a node answer the same, and returns it.
func (c *cluster) sameAs(t *testing.T, m *member, what string, do call) (proto.Message, error) {
	t.Helper()
	want, wantErr := do(m.clients)
	got, err := do(c.clients)
	if !proto.Equal(status.Convert(wantErr).Proto(), status.Convert(err).Proto()) {
		t.Errorf("%s: the router says %v, the node %v", what, err, wantErr)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); wantErr == nil && diff != "" {
		t.Errorf("%s: -node +router\n%s", what, diff)
	}
	return got, err
}

// snapshotsAreThose has snapshots made and deleted as csi-snapshotter does.
func (c *cluster) snapshotsAreThose(t *testing.T) {
	for _, m := range c.members {
		volume := m.create(t, "snapshots")
		made, err := c.control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "routed", SourceVolumeId: volume})
		must(t, err)
		id := made.GetSnapshot().GetSnapshotId()
		if !strings.HasPrefix(id, m.pool+"-snap-") || !made.GetSnapshot().GetReadyToUse() {
			t.Errorf("%s has made %v", m.name, made)
		}
		for what, do := range map[string]call{
			"the same again":       createSnapshot(t, &csi.CreateSnapshotRequest{Name: "routed", SourceVolumeId: volume}),
			"another of the name":  createSnapshot(t, &csi.CreateSnapshotRequest{Name: "routed", SourceVolumeId: volume, Parameters: map[string]string{"crust.dev/keep-bases": "1"}}),
			"get":                  getSnapshot(t, id),
			"list it":              listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: id}),
			"list it of a volume":  listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: id, SourceVolumeId: volume}),
			"list it of another":   listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: id, SourceVolumeId: "pvc-1"}),
			"list those of volume": listSnapshots(t, &csi.ListSnapshotsRequest{SourceVolumeId: volume}),
		} {
			c.sameAs(t, m, what, do)
		}
		c.pages(t, m, volume)
		for range 2 {
			_, err := deleteSnapshot(t, id)(c.clients)
			must(t, err)
		}
		_, err = getSnapshot(t, id)(m.clients)
		wantCode(t, err, codes.NotFound, id)
	}
}

// pages reads a list one by one: tokens go to the node that has given them.
func (c *cluster) pages(t *testing.T, m *member, volume string) {
	t.Helper()
	m.snapshot(t, "second", volume)
	var ids []string
	for token := ""; ; {
		list, err := c.control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SourceVolumeId: volume, MaxEntries: 1, StartingToken: token})
		must(t, err)
		for _, e := range list.GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
		if token = list.GetNextToken(); token == "" {
			break
		}
	}
	if !slices.IsSorted(ids) || len(ids) != 2 {
		t.Errorf("%s has %v", m.name, ids)
	}
}

func (c *cluster) groupsAreThose(t *testing.T) {
	for _, m := range c.members {
		a, b := m.create(t, "group-a"), m.create(t, "group-b")
		made, err := createGroup(t, "group", a, b)(c.clients)
		must(t, err)
		group := made.(*csi.CreateVolumeGroupSnapshotResponse).GetGroupSnapshot()
		id, snapshots := group.GetGroupSnapshotId(), []string{}
		for _, s := range group.GetSnapshots() {
			snapshots = append(snapshots, s.GetSnapshotId())
		}
		if !strings.HasPrefix(id, m.pool+"-group-") || len(snapshots) != 2 || !group.GetReadyToUse() {
			t.Fatalf("%s has made %v", m.name, group)
		}
		for what, do := range map[string]call{
			"the same again":     createGroup(t, "group", b, a),
			"another":            createGroup(t, "group", a),
			"get":                getGroup(t, id, snapshots...),
			"get without ids":    getGroup(t, id),
			"get with other ids": getGroup(t, id, snapshots[0]),
			"list a member":      listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: snapshots[1]}),
			"delete a member":    deleteSnapshot(t, snapshots[1]),
			"delete, other ids":  deleteGroup(t, id, snapshots[0]),
		} {
			c.sameAs(t, m, what, do)
		}
		for range 2 {
			_, err := deleteGroup(t, id, snapshots...)(c.clients)
			must(t, err)
		}
		_, err = getGroup(t, id)(m.clients)
		wantCode(t, err, codes.NotFound, id)
		_, err = getSnapshot(t, snapshots[0])(m.clients)
		wantCode(t, err, codes.NotFound, snapshots[0])
	}
	a, b := c.members[0].create(t, "group-a"), c.members[1].create(t, "group-b")
	_, err := createGroup(t, "both", a, b)(c.clients)
	wantCode(t, err, codes.FailedPrecondition, a, b, "pool "+c.members[0].pool, "pool "+c.members[1].pool)
	_, ofNode := createGroup(t, "both", a, b)(c.members[0].clients)
	wantCode(t, ofNode, codes.FailedPrecondition, a, b)
}

// snapshotErrorsAreThose is about what cannot be, which has the node's answer whether or not a node is asked.
func (c *cluster) snapshotErrorsAreThose(t *testing.T) {
	m := c.members[1]
	volume, zeros := m.create(t, "snapshot-errors"), strings.Repeat("0", 32)
	for what, row := range map[string]struct {
		do   call
		want codes.Code
	}{
		"create without a name":             {createSnapshot(t, &csi.CreateSnapshotRequest{SourceVolumeId: volume}), codes.InvalidArgument},
		"create without a volume":           {createSnapshot(t, &csi.CreateSnapshotRequest{Name: "n"}), codes.InvalidArgument},
		"create of no volume of ours":       {createSnapshot(t, &csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: "pvc-1"}), codes.NotFound},
		"create of a volume that is gone":   {createSnapshot(t, &csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: m.pool + "-vol-" + zeros}), codes.NotFound},
		"create with an unknown parameter":  {createSnapshot(t, &csi.CreateSnapshotRequest{Name: "n", SourceVolumeId: volume, Parameters: map[string]string{"x": "y"}}), codes.InvalidArgument},
		"delete without an id":              {deleteSnapshot(t, ""), codes.InvalidArgument},
		"delete of no id of ours":           {deleteSnapshot(t, "snap-1"), codes.OK},
		"delete of a volume":                {deleteSnapshot(t, volume), codes.OK},
		"delete of one that is gone":        {deleteSnapshot(t, m.pool+"-snap-"+zeros), codes.OK},
		"delete of another driver's handle": {deleteSnapshot(t, "bak://backing?x=y"), codes.InvalidArgument},
		"delete of a wrong handle":          {deleteSnapshot(t, "bi://backing?x=y"), codes.InvalidArgument},
		"get without an id":                 {getSnapshot(t, ""), codes.InvalidArgument},
		"get of no id of ours":              {getSnapshot(t, "snap-1"), codes.NotFound},
		"get of one that is gone":           {getSnapshot(t, m.pool+"-snap-"+zeros), codes.NotFound},
		"get of a wrong handle":             {getSnapshot(t, "bi://backing?x=y"), codes.InvalidArgument},
		"list of no id of ours":             {listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: "snap-1"}), codes.OK},
		"list of no volume of ours":         {listSnapshots(t, &csi.ListSnapshotsRequest{SourceVolumeId: "pvc-1"}), codes.OK},
		"list of one that is gone":          {listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: m.pool + "-snap-" + zeros}), codes.OK},
		"list of a wrong handle":            {listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: "bi://backing?x=y"}), codes.InvalidArgument},
		"list with a token of another pool": {listSnapshots(t, &csi.ListSnapshotsRequest{SourceVolumeId: volume, StartingToken: c.members[0].pool + "-snap-" + zeros}), codes.Aborted},
		"list with a negative length":       {listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: "snap-1", MaxEntries: -1}), codes.InvalidArgument},
		"group of an empty id":              {createGroup(t, "g", volume, ""), codes.InvalidArgument},
		"group of one volume twice":         {createGroup(t, "g", volume, volume), codes.InvalidArgument},
		"group of no volume of ours":        {createGroup(t, "g", "pvc-1"), codes.NotFound},
		"group of a volume that is gone":    {createGroup(t, "g", m.pool+"-vol-"+zeros), codes.NotFound},
		"delete without a group's id":       {deleteGroup(t, ""), codes.InvalidArgument},
		"delete of no group's id":           {deleteGroup(t, "group-1"), codes.OK},
		"delete of a group that is gone":    {deleteGroup(t, m.pool+"-group-"+zeros), codes.OK},
		"get without a group's id":          {getGroup(t, ""), codes.InvalidArgument},
		"get of no group's id":              {getGroup(t, "group-1"), codes.NotFound},
		"get of a group that is gone":       {getGroup(t, m.pool+"-group-"+zeros), codes.NotFound},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := c.sameAs(t, m, what, row.do)
			wantCode(t, err, row.want)
		})
	}
	_, err := createGroup(t, "g")(c.clients)
	wantCode(t, err, codes.InvalidArgument, "source_volume_ids")
	_, err = listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: "snap-1", StartingToken: "t"})(c.clients)
	wantCode(t, err, codes.Aborted, "starting_token")
	_, err = listSnapshots(t, &csi.ListSnapshotsRequest{MaxEntries: 10})(c.clients)
	wantCode(t, err, codes.Unimplemented, "snapshot_id", "source_volume_id", "each node")
}

// about are all calls about objects of a pool.
func about(t *testing.T, volume, snapshot, group string) map[string]call {
	return map[string]call{
		"CreateSnapshot":                  createSnapshot(t, &csi.CreateSnapshotRequest{Name: "astray", SourceVolumeId: volume}),
		"DeleteSnapshot":                  deleteSnapshot(t, snapshot),
		"GetSnapshot":                     getSnapshot(t, snapshot),
		"ListSnapshots of a snapshot":     listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: snapshot}),
		"ListSnapshots of a volume":       listSnapshots(t, &csi.ListSnapshotsRequest{SourceVolumeId: volume}),
		"CreateVolumeGroupSnapshot":       createGroup(t, "astray", volume),
		"DeleteVolumeGroupSnapshot":       deleteGroup(t, group, snapshot),
		"GetVolumeGroupSnapshot":          getGroup(t, group, snapshot),
		"DeleteSnapshot of an image":      deleteSnapshot(t, exported("x", volume)),
		"DeleteSnapshot of an image's id": deleteSnapshot(t, exported("x", volume)+"&image-id="+strings.Replace(snapshot, "-snap-", "-img-", 1)),
		"GetSnapshot of an image":         getSnapshot(t, exported("x", volume)),
	}
}

// snapshotsOutOfReach is about pools that nobody has, and about a disk that has moved: nothing is ever gone because it was not found.
func (c *cluster) snapshotsOutOfReach(t *testing.T) {
	const nobodys = "0123456789ab"
	id := func(kind string) string { return nobodys + "-" + kind + "-" + strings.Repeat("0", 32) }
	for what, do := range about(t, id("vol"), id("snap"), id("group")) {
		t.Run(what+" of nobody", func(t *testing.T) {
			_, err := do(c.clients)
			wantCode(t, err, codes.Unavailable, nobodys, label)
		})
	}
	had, other := c.members[0], c.members[1]
	volume := had.create(t, "out of reach")
	snapshot := had.snapshot(t, "out of reach", volume)
	made, err := createGroup(t, "out of reach", volume)(had.clients)
	must(t, err)
	group := made.(*csi.CreateVolumeGroupSnapshotResponse).GetGroupSnapshot()
	c.api.put(had.name, other.address, had.pool)
	for what, do := range about(t, volume, snapshot, group.GetGroupSnapshotId()) {
		t.Run(what+" gone astray", func(t *testing.T) {
			_, err := do(c.clients)
			wantCode(t, err, codes.Unavailable, had.pool, other.pool, "label")
		})
	}
	c.api.put(had.name, had.address, had.pool)
	for _, do := range []call{getSnapshot(t, snapshot), getGroup(t, group.GetGroupSnapshotId())} {
		_, err := c.sameAs(t, had, "what was out of reach", do)
		must(t, err)
	}
	// A router that does not say which pool it means may mean any.
	conn := c.dialNode(t, c.credentials(t, c.certs), "")
	_, err = csi.NewControllerClient(conn).DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
	wantCode(t, err, codes.Unavailable, had.pool, "version")
	_, err = getSnapshot(t, snapshot)(had.clients)
	must(t, err)
}

// snapshotsWhileItHangs asks a node that does not answer.
func (c *cluster) snapshotsWhileItHangs(t *testing.T, volume, snapshot string) {
	t.Helper()
	for what, call := range map[string]func(context.Context) error{
		"CreateSnapshot": func(ctx context.Context) error {
			_, err := c.control.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "hangs", SourceVolumeId: volume})
			return err
		},
		"CreateVolumeGroupSnapshot": func(ctx context.Context) error {
			_, err := c.groups.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{Name: "hangs", SourceVolumeIds: []string{volume}})
			return err
		},
		"DeleteSnapshot": func(ctx context.Context) error {
			_, err := c.control.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
			return err
		},
		"DeleteSnapshot of an image of no pool": func(ctx context.Context) error {
			_, err := c.control.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: download("hangs", "http://images.example.com/x")})
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			wantCode(t, call(ctx), codes.DeadlineExceeded)
		})
	}
}

// probed is about what the kubelet asks: a router that does not get on is not well, whatever holds it.
func (c *cluster) probed(t *testing.T) {
	probe := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second) // the kubelet ends a probe like this, too
		defer cancel()
		return exec.CommandContext(ctx, c.bin, "probe", "--endpoint", "unix://"+c.router.socket).Run()
	}
	eventually(t, probe)
	goOn := halt.Process(t, c.router.cmd.Process.Pid)
	err := probe()
	goOn()
	if err == nil {
		t.Error("a router that stands still is well")
	}
	eventually(t, probe)
}
