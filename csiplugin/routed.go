package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"crust.dev/crust/csiplugin/handle"
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
	r := &routed{controller: &controller{store: s}, metadata: &snapshotMetadata{store: s, block: p.cfg.MetadataBlock}}
	csi.RegisterControllerServer(server, r)
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
// refused here, whoever asks.
type routed struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedSnapshotMetadataServer
	controller *controller
	metadata   *snapshotMetadata
}

// here makes an error about another pool's object one after which the router's caller asks again: the router took this node for
// that pool's, and "not found" would be read as "gone", or as a volume that never grows.
func here[R any](resp R, err error) (R, error) { return resp, astray(err) }

func astray(err error) error {
	var foreign *handle.ForeignError
	if !errors.As(err, &foreign) {
		return err
	}
	return fmt.Errorf("the router takes this node for the one of pool %s, and it has pool %s; the label of its Node object is out of date, correct or remove it: %w",
		foreign.Handle.Pool(), foreign.Asked, errdefs.ErrUnavailable)
}

func (r *routed) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return here(r.controller.ControllerExpandVolume(ctx, req))
}

func (r *routed) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	return here(r.controller.ControllerModifyVolume(ctx, req))
}

func (r *routed) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return here(r.controller.ControllerGetVolume(ctx, req))
}

func (r *routed) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return here(r.controller.ControllerGetVolumeHealth(ctx, req))
}

func (r *routed) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	return astray(r.metadata.GetMetadataAllocated(req, stream))
}

func (r *routed) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	return astray(r.metadata.GetMetadataDelta(req, stream))
}
