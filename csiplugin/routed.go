package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"crust.dev/crust/csiplugin/internal/routing"
	"crust.dev/crust/protocol/rpc"
)

// RoutedConfig is how a plugin is reached by the router. The zero value: it is not.
type RoutedConfig struct {
	// Listen is the TCP address to serve on, host:port.
	Listen string
	// Files are the plugin's certificate and whose certificates it believes.
	Files routing.Files
}

// validate does no I/O. Errors are ErrInvalidArgument.
func (c RoutedConfig) validate(m Mode) error {
	given, err := c.Files.Given()
	switch {
	case err != nil:
		return err
	case given != (c.Listen != ""):
		return invalid("the address for the router, %q, and a certificate go together; give both", c.Listen)
	case given && !m.controller():
		return invalid("mode %s serves nothing that a router passes on", m)
	}
	return nil
}

const (
	// connectionAge is how long a connection lives before it is made anew, with the certificates of that time. Calls on it end first.
	connectionAge = 10 * time.Minute
	// handshakeTime is how long somebody may take to say who they are.
	handshakeTime = 10 * time.Second
)

// listenRouted opens the port for the router, and returns what serves there until its context ends.
func (p *Plugin) listenRouted(ctx context.Context, s *store) (serve func(context.Context) error, err error) {
	cfg := p.cfg.Routed
	if cfg.Listen == "" {
		return func(context.Context) error { return nil }, nil
	}
	if err := cfg.Files.Check(); err != nil {
		return nil, fmt.Errorf("serve the router on %s: %w", cfg.Listen, err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("serve the router: %w", err)
	}
	opts := append(routing.Marks(string(s.pool)),
		grpc.Creds(cfg.Files.Credentials(routing.RouterName(p.cfg.DriverName), p.cfg.Log)), // in place of those of unix sockets
		grpc.ChainUnaryInterceptor(p.watched), grpc.WaitForHandlers(true), grpc.ConnectionTimeout(handshakeTime),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: connectionAge}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: routing.KeepaliveTime / 2}))
	server := rpc.NewServer(ctx, p.cfg.Log, opts...)
	c := &controller{store: s}
	r := &routed{controller: c, groups: &groupController{controller: c}, metadata: &snapshotMetadata{store: s, block: p.cfg.MetadataBlock}}
	csi.RegisterControllerServer(server, r)
	csi.RegisterGroupControllerServer(server, r)
	csi.RegisterSnapshotMetadataServer(server, r)
	p.cfg.Log.InfoContext(ctx, "serving the router", "pool", string(s.pool), "address", l.Addr().String())
	return func(ctx context.Context) error {
		if err := rpc.ServeGRPC(ctx, server, l, stopTimeout); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serve the router on %s: %w", cfg.Listen, err)
		}
		return nil
	}, nil
}

// routed is what the router passes on to a node: the calls of sidecars of which there is one for all nodes. All others are
// refused here, whoever asks. Calls that mean another pool do not come as far (routing.Marks).
type routed struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	controller *controller
	groups     *groupController
	metadata   *snapshotMetadata
}

func (r *routed) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return r.controller.ControllerExpandVolume(ctx, req)
}

func (r *routed) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	return r.controller.ControllerModifyVolume(ctx, req)
}

func (r *routed) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return r.controller.ControllerGetVolume(ctx, req)
}

func (r *routed) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return r.controller.ControllerGetVolumeHealth(ctx, req)
}

func (r *routed) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	return r.controller.CreateSnapshot(ctx, req)
}

func (r *routed) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	return r.controller.DeleteSnapshot(ctx, req)
}

func (r *routed) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	return r.controller.GetSnapshot(ctx, req)
}

func (r *routed) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	return r.controller.ListSnapshots(ctx, req)
}

func (r *routed) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	return r.groups.CreateVolumeGroupSnapshot(ctx, req)
}

func (r *routed) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	return r.groups.DeleteVolumeGroupSnapshot(ctx, req)
}

func (r *routed) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	return r.groups.GetVolumeGroupSnapshot(ctx, req)
}

func (r *routed) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	return r.metadata.GetMetadataAllocated(req, stream)
}

func (r *routed) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	return r.metadata.GetMetadataDelta(req, stream)
}
