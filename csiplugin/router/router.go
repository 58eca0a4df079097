package router

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/routing"
	"crust.dev/crust/protocol/rpc"
)

// DefaultPort is the TCP port of the nodes.
const DefaultPort = 9812

// Config is what a router needs to know. All fields but Kubeconfig are required.
type Config struct {
	// Endpoint is the socket to serve the sidecar on, "unix:///absolute/path".
	Endpoint string
	// DriverName is that of the nodes' plugins.
	DriverName string
	// Version is the program's version.
	Version string
	// Port is where the nodes' plugins listen for the router.
	Port int
	// Files are the router's certificate and whose certificates it believes.
	Files routing.Files
	// Kubeconfig is a file that says which API server to ask; empty: that of the pod's service account.
	Kubeconfig string
	Log        *slog.Logger
}

// Router passes calls on. It does nothing before Run.
type Router struct {
	cfg    Config
	socket string
	pools  resolver

	mu    sync.Mutex
	links map[handle.Pool]*link
}

// resolver knows where pools are.
type resolver interface {
	// find returns the node that has a pool. ErrUnavailable, with what to do, if it is not known.
	find(ctx context.Context, pool handle.Pool) (place, error)
	// all returns the nodes of all pools, at least one. ErrUnavailable, with what to do, if one of them is not known.
	all(ctx context.Context) (map[handle.Pool]place, error)
}

// New checks a configuration; it does no I/O. Errors are ErrInvalidArgument.
func New(cfg Config) (*Router, error) {
	socket, err := rpc.ParseEndpoint(cfg.Endpoint)
	if err != nil {
		return nil, err
	}
	given, err := cfg.Files.Given()
	switch {
	case err != nil:
		return nil, err
	case !given:
		return nil, fmt.Errorf("a router needs a certificate, its key and the authorities of the nodes: %w", errdefs.ErrInvalidArgument)
	case cfg.Port < 1 || cfg.Port > 65535:
		return nil, fmt.Errorf("port %d of the nodes: want 1 to 65535: %w", cfg.Port, errdefs.ErrInvalidArgument)
	case cfg.DriverName == "" || cfg.Version == "" || cfg.Log == nil:
		return nil, fmt.Errorf("name of the driver %q, version %q: want both, and a log: %w", cfg.DriverName, cfg.Version, errdefs.ErrInvalidArgument)
	}
	return &Router{cfg: cfg, socket: socket, links: map[handle.Pool]*link{}}, nil
}

// stopTimeout is how long calls may take to end after Run's context has.
const stopTimeout = 30 * time.Second

// Run serves until ctx ends, and then lets the calls that are under way end.
func (r *Router) Run(ctx context.Context) (err error) {
	if err := r.cfg.Files.Check(); err != nil {
		return err
	}
	if r.pools == nil {
		if r.pools, err = connect(r.cfg); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, r.hangUp()) }()
	l, err := rpc.Listen(ctx, r.socket)
	if err != nil {
		return err
	}
	server := rpc.NewServer(ctx, r.cfg.Log, grpc.ChainUnaryInterceptor(refuse), grpc.UnknownServiceHandler(refuseStream), grpc.WaitForHandlers(true))
	csi.RegisterIdentityServer(server, &identity{name: r.cfg.DriverName, version: r.cfg.Version, router: r})
	csi.RegisterControllerServer(server, &controller{Router: r})
	csi.RegisterGroupControllerServer(server, &groupController{Router: r})
	csi.RegisterSnapshotMetadataServer(server, &snapshotMetadata{Router: r})
	r.cfg.Log.InfoContext(ctx, "serving", "mode", "router", rpc.LogDriver, r.cfg.DriverName, rpc.LogPath, r.socket)
	if err := rpc.ServeGRPC(ctx, server, l, stopTimeout); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve on %s: %w", r.socket, err)
	}
	return nil
}
