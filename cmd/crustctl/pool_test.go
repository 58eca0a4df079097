package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

// driver answers as a crust-csi would that has a volume, its snapshot, a clone of that, and a volume that is just being
// made, which CSI does not list.
type driver struct {
	csi.UnimplementedControllerServer
	poolv1.UnimplementedPoolServer
}

func (driver) GetStatus(context.Context, *poolv1.GetStatusRequest) (*poolv1.GetStatusResponse, error) {
	return &poolv1.GetStatusResponse{Driver: "a.example", Pool: "0123456789ab", Directory: "/pool", TotalBytes: 100 << 30, FreeBytes: 40 << 30, PromisedBytes: 200 << 30, Volumes: 3, Snapshots: 1}, nil
}

func (driver) ListObjects(_ context.Context, req *poolv1.ListObjectsRequest) (*poolv1.ListObjectsResponse, error) {
	objects := []*poolv1.Object{
		{Id: "p-snap-1", Name: "snapshot-1", Snapshot: true, State: "ready", SizeBytes: 1 << 30, AllocatedBytes: 512 << 20, Source: "p-vol-1", MadeFromIt: []string{"p-vol-2"}, Created: ago(time.Hour)},
		{Id: "p-vol-1", Name: "pvc-1", State: "ready", SizeBytes: 1 << 30, AllocatedBytes: 600 << 20, FsType: "ext4", Targets: []string{"/pods/a"}, MadeFromIt: []string{"p-snap-1"}, Created: ago(2 * time.Hour)},
		{Id: "p-vol-2", Name: "pvc\x1b[2J", State: "lost", SizeBytes: 2 << 30, Source: "p-snap-1", Created: ago(time.Minute)},
		{Id: "p-vol-3", Name: "pvc-3", State: "creating", SizeBytes: 2 << 30, Created: ago(time.Second)},
	}
	if req.GetExtents() {
		objects[1].SharedBytes, objects[1].Extents = 500<<20, 321
	}
	return &poolv1.ListObjectsResponse{Objects: objects}, nil
}

// ListVolumes has a page for each volume.
func (driver) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	id, next := "p-vol-1", "p-vol-1"
	if req.GetStartingToken() != "" {
		id, next = "p-vol-2", ""
	}
	return &csi.ListVolumesResponse{Entries: []*csi.ListVolumesResponse_Entry{{Volume: &csi.Volume{VolumeId: id}}}, NextToken: next}, nil
}

func (driver) ListSnapshots(context.Context, *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	return &csi.ListSnapshotsResponse{Entries: []*csi.ListSnapshotsResponse_Entry{{Snapshot: &csi.Snapshot{SnapshotId: "p-snap-1"}}}}, nil
}

// startDriver serves a driver until the test ends.
func startDriver(t *testing.T) (endpoint string) {
	t.Helper()
	return serveAt(t, "csi.sock", func(server *grpc.Server) {
		csi.RegisterControllerServer(server, driver{})
		poolv1.RegisterPoolServer(server, driver{})
	})
}

func TestPoolCommands(t *testing.T) {
	endpoint := startDriver(t)
	ask := func(t *testing.T, args ...string) string {
		t.Helper()
		var out bytes.Buffer
		cmd := newCommand(&options{now: func() time.Time { return now }})
		cmd.SetOut(&out)
		cmd.SetErr(io.Discard)
		cmd.SetArgs(append(args, "--driver-endpoint", endpoint))
		if err := cmd.ExecuteContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	for name, c := range map[string]struct {
		args       []string
		want, none []string
	}{
		"pool":              {[]string{"pool"}, []string{"0123456789ab", "100", "40", "200", "/pool", "crash-consistent only"}, nil},
		"volumes":           {[]string{"volumes"}, []string{"p-vol-1", "pvc-1", "p-vol-2", "lost", "p-snap-1", "120m"}, []string{"p-vol-3", "\x1b", "SHARED", "/pods/a"}},
		"volumes, wide":     {[]string{"volumes", "-o", "wide"}, []string{"/pods/a"}, nil},
		"volumes, sharing":  {[]string{"volumes", "--sharing"}, []string{"SHARED", "500", "321"}, nil},
		"snapshots":         {[]string{"snapshots"}, []string{"p-snap-1", "p-vol-1", "512", "1"}, []string{"p-vol-2"}},
		"snapshots, wide":   {[]string{"snapshots", "-o", "wide"}, []string{"p-vol-2"}, nil},
		"snapshots as JSON": {[]string{"snapshots", "-o", "json"}, []string{"p-vol-2", "made_from_it"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := ask(t, c.args...)
			for _, text := range c.want {
				if !strings.Contains(got, text) {
					t.Errorf("%q is missing in\n%s", text, got)
				}
			}
			for _, text := range c.none {
				if strings.Contains(got, text) {
					t.Errorf("%q is in\n%s", text, got)
				}
			}
			if strings.HasSuffix(name, "JSON") && !json.Valid([]byte(got)) {
				t.Errorf("no JSON:\n%s", got)
			}
		})
	}
}

func TestPoolCommandsWithoutADriver(t *testing.T) {
	cmd := newCommand(&options{})
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	cmd.SetArgs([]string{"pool", "--driver-endpoint", "unix:///nonexistent/csi.sock", "--timeout", "1s"})
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "/nonexistent/csi.sock") {
		t.Errorf("got %v", err)
	}
}
