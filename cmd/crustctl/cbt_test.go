package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"

	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

// backupDriver answers as a crust-csi would that has two snapshots, and two that were deleted and are kept.
type backupDriver struct {
	csi.UnimplementedSnapshotMetadataServer
	poolv1.UnimplementedBasesServer
	bases    []*poolv1.Base
	released []string
}

func newBackupDriver() *backupDriver {
	return &backupDriver{bases: []*poolv1.Base{
		{Id: "p-snap-1", Volume: "p-vol-1", SizeBytes: 10 << 30, HeldBytes: 300 << 20, Keep: 2, Created: ago(50 * time.Hour), Deleted: ago(49 * time.Hour)},
		{Id: "p-snap-2", Volume: "p-vol\x1b[2J", SizeBytes: 1 << 30, HeldBytes: 4096, Keep: 1, Created: ago(2 * time.Hour), Deleted: ago(time.Minute)},
	}}
}

func (d *backupDriver) ListBases(context.Context, *poolv1.ListBasesRequest) (*poolv1.ListBasesResponse, error) {
	return &poolv1.ListBasesResponse{Bases: d.bases}, nil
}

func (d *backupDriver) ReleaseBase(_ context.Context, req *poolv1.ReleaseBaseRequest) (*poolv1.ReleaseBaseResponse, error) {
	if req.GetId() == "p-snap-2" {
		return nil, errors.Join(errors.New("snapshot p-snap-2 is in use by another call"), errdefs.ErrAborted)
	}
	d.released = append(d.released, req.GetId())
	return &poolv1.ReleaseBaseResponse{}, nil
}

// tuples are ranges of 8192 bytes, from the one on that has a byte beyond an offset.
func tuples(offset int64, at ...int64) (list []*csi.BlockMetadata) {
	for _, start := range at {
		if start+8192 > offset {
			list = append(list, &csi.BlockMetadata{ByteOffset: start, SizeBytes: 8192})
		}
	}
	return list
}

func (d *backupDriver) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	for _, at := range []int64{0, 1 << 20} { // two messages
		if err := stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: 1 << 30, BlockMetadata: tuples(req.GetStartingOffset(), at, at+16384),
		}); err != nil {
			return err
		}
	}
	return nil
}

func (d *backupDriver) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	resp := &csi.GetMetadataDeltaResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: 1 << 30}
	switch req.GetBaseSnapshotId() {
	case "p-snap-1":
		resp.BlockMetadata = tuples(req.GetStartingOffset(), 65536)
	case "p-snap-2": // nothing has changed
	default:
		return errors.Join(errors.New("there is no snapshot "+req.GetBaseSnapshotId()), errdefs.ErrNotFound)
	}
	return stream.Send(resp)
}

// serveBackups serves a driver until the test ends, and returns what runs crustctl with it.
func serveBackups(t *testing.T, d *backupDriver) func(args ...string) (string, error) {
	t.Helper()
	endpoint := serveAt(t, "csi.sock", func(server *grpc.Server) {
		csi.RegisterSnapshotMetadataServer(server, d)
		poolv1.RegisterBasesServer(server, d)
	})
	return func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := newCommand(&options{now: func() time.Time { return now }})
		cmd.SetArgs(append(args, "--driver-endpoint", endpoint))
		cmd.SetOut(&out)
		cmd.SetErr(io.Discard)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		err := cmd.ExecuteContext(context.Background())
		return out.String(), err
	}
}

func TestChangedBlocksOutput(t *testing.T) {
	full, empty := serveBackups(t, newBackupDriver()), serveBackups(t, &backupDriver{})
	for _, row := range []struct {
		file string
		ask  func(...string) (string, error)
		args string
	}{
		{"cbt-bases", full, "cbt bases"},
		{"cbt-bases-wide", full, "cbt bases -o wide"},
		{"cbt-bases-json", full, "cbt bases -o json"},
		{"cbt-bases-empty", empty, "cbt bases"},
		{"cbt-release", full, "cbt release p-snap-1"},
		{"cbt-release-json", full, "cbt release p-snap-1 -o json"},
		{"cbt-allocated", full, "cbt allocated p-snap-3"},
		{"cbt-allocated-offset", full, "cbt allocated p-snap-3 --offset 1048576"},
		{"cbt-allocated-totals", full, "cbt allocated p-snap-3 --totals"},
		{"cbt-delta", full, "cbt delta p-snap-3 p-snap-1"},
		{"cbt-delta-json", full, "cbt delta p-snap-3 p-snap-1 -o json"},
		{"cbt-delta-none", full, "cbt delta p-snap-3 p-snap-2"},
	} {
		t.Run(row.file, func(t *testing.T) {
			got, err := row.ask(strings.Fields(row.args)...)
			if err != nil {
				t.Error(err)
			}
			path := filepath.Join("testdata", row.file+".txt")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestReleasingABase(t *testing.T) {
	d := newBackupDriver()
	ask := serveBackups(t, d)
	if out, err := ask("cbt", "release", "p-snap-1"); err != nil || !strings.Contains(out, "p-snap-1") || !slices.Equal(d.released, []string{"p-snap-1"}) {
		t.Errorf("%q, %v: released are %q", out, err, d.released)
	}
	if out, err := ask("cbt", "release", "p-snap-2"); !errors.Is(err, errdefs.ErrAborted) || !strings.Contains(err.Error(), "in use by another call") || out != "" {
		t.Errorf("a base that is being compared with: %q, %v", out, err)
	}
	for _, args := range [][]string{
		{"cbt", "release"}, {"cbt", "release", "a", "b"}, {"cbt", "bases", "a"}, {"cbt", "delta", "p-snap-3"}, {"cbt", "allocated"},
		{"cbt", "copy", "p-snap-3"}, {"cbt", "copy", "p-snap-3", "p-snap-1", "--source", "/dev/null", "--image", "/nonexistent/image"},
	} {
		if out, err := ask(args...); exitCode(err) != 1 || out != "" {
			t.Errorf("%q is accepted: %q", args, out)
		}
	}
	if len(d.released) != 1 {
		t.Errorf("released are %q", d.released)
	}
	if _, err := ask("cbt", "delta", "p-snap-3", "p-snap-9"); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), "p-snap-9") {
		t.Errorf("a base that there is not: %v", err)
	}
}
