package router_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"crust.dev/crust/csiplugin/internal/routing"
)

// scripted is a node that says what no real one says on demand.
type scripted struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedSnapshotMetadataServer
	refusal *status.Status
	// deadlines are those of the calls, ended how the streams have.
	deadlines chan time.Time
	ended     chan error
}

func (s *scripted) ControllerExpandVolume(ctx context.Context, _ *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	deadline, _ := ctx.Deadline()
	s.deadlines <- deadline
	return nil, s.refusal.Err()
}

// GetMetadataAllocated sends one message, and is silent until nobody waits any more.
func (s *scripted) GetMetadataAllocated(_ *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	if err := stream.Send(&csi.GetMetadataAllocatedResponse{VolumeCapacityBytes: 1}); err != nil {
		return err
	}
	<-stream.Context().Done()
	s.ended <- stream.Context().Err()
	return s.refusal.Err()
}

// addScripted adds a node with a pool to the cluster.
func (c *cluster) addScripted(t *testing.T, pool string) *scripted {
	t.Helper()
	refusal, err := status.New(codes.FailedPrecondition, "a text").WithDetails(durationpb.New(time.Hour))
	must(t, err)
	s := &scripted{refusal: refusal, deadlines: make(chan time.Time, 1), ended: make(chan error, 1)}
	dir := c.ca.issue(t.TempDir(), routing.NodeName("csi.crust.dev"))
	files := routing.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
	server := grpc.NewServer(append(routing.Marks(pool), grpc.Creds(files.Credentials(routing.RouterName("csi.crust.dev"), slog.New(slog.DiscardHandler))))...)
	csi.RegisterControllerServer(server, s)
	csi.RegisterSnapshotMetadataServer(server, s)
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.3", fmt.Sprint(c.port)))
	must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		must(t, <-ended)
	})
	c.api.put("scripted", "127.0.0.3", pool)
	return s
}

// asIfTheNodeWereCalled is about what goes through the router unseen.
func (c *cluster) asIfTheNodeWereCalled(t *testing.T) {
	const pool = "ffffffffffff"
	s := c.addScripted(t, pool)
	t.Run("details and deadline", func(t *testing.T) {
		want := time.Now().Add(47 * time.Second)
		ctx, cancel := context.WithDeadline(t.Context(), want)
		defer cancel()
		_, err := c.control.ControllerExpandVolume(ctx, grown(pool+"-vol-"+strings.Repeat("0", 32), mib))
		if got := status.Convert(err); !proto.Equal(got.Proto(), s.refusal.Proto()) {
			t.Errorf("got %v with %v", got, got.Details())
		}
		if got := <-s.deadlines; got.Sub(want).Abs() > 5*time.Second {
			t.Errorf("the node has until %v, the caller until %v", got, want)
		}
	})
	t.Run("a caller that goes away while the node is silent", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := c.metadata.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: pool + "-snap-" + strings.Repeat("0", 32)})
		must(t, err)
		_, err = stream.Recv()
		must(t, err)
		cancel()
		select {
		case <-s.ended:
		case <-time.After(20 * time.Second):
			t.Error("the node's call goes on")
		}
	})
}
