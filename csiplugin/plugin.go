package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/pool"
	"crust.dev/crust/protocol/rpc"
)

// DefaultDriverName is the name that the plugin has unless it is given another one.
const DefaultDriverName = "csi.crust.dev"

// Mode is which of CSI's services a plugin serves, beside Identity.
type Mode string

// The modes. Because a pool is open in one process only, ModeController and ModeNode are for pools of their own: a node
// with one pool runs ModeAll.
const (
	ModeAll        Mode = "all"
	ModeController Mode = "controller"
	ModeNode       Mode = "node"
)

func (m Mode) controller() bool { return m == ModeAll || m == ModeController }
func (m Mode) node() bool       { return m == ModeAll || m == ModeNode }

// Config is what a plugin needs to know. All fields but PoolSize are required.
type Config struct {
	// Endpoint is the socket to serve on, "unix:///absolute/path".
	Endpoint string
	// NodeID identifies this node to the CO. At most 256 bytes.
	NodeID string
	// PoolDir is the absolute path of the pool's directory, the same in the CO's mount namespace.
	PoolDir string
	// PoolSize in bytes is what a pool's image is made with if it needs one; 0 chooses. See pool.Config.
	PoolSize int64
	// Mode is which services are served.
	Mode Mode
	// DriverName is the plugin's name (CSI, GetPluginInfo), in lower case: it is the prefix of the topology key, too.
	DriverName string
	// Version is the program's version.
	Version string
	// Crustd is the socket of the node daemon, "unix:///absolute/path", for filesystem-consistent snapshots of volumes in
	// sandboxes and for group snapshots. Empty: there is none, and what needs it is refused.
	Crustd string
	// MetadataBlock is the size in bytes, a power of two from 4096 to 1 GiB, of the ranges that the SnapshotMetadata
	// service reports (FIXED_LENGTH); for a snapshot whose size is no multiple of it, the next smaller power that the size
	// is a multiple of. 0: ranges are as they are (VARIABLE_LENGTH), which takes far fewer of them.
	MetadataBlock int64
	Log           *slog.Logger
	// Images is how backing images are prepared.
	Images ImagesConfig
	// Routed is how the router reaches this plugin.
	Routed RoutedConfig
	// Metrics is the TCP address on which to serve /metrics over HTTP, host:port. Empty: nowhere.
	Metrics string
}

// Plugin is a CSI plugin. It does nothing before Run.
type Plugin struct {
	cfg    Config
	socket string
	// For tests: watch adds to the context of each call and of the start, and boot is the boot id.
	watch func(context.Context) context.Context
	boot  func() (string, error)
}

var driverName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

// New checks a configuration; it does no I/O. Errors are ErrInvalidArgument.
func New(cfg Config) (*Plugin, error) {
	socket, err := rpc.ParseEndpoint(cfg.Endpoint)
	switch {
	case err != nil:
		return nil, err
	case cfg.Mode != ModeAll && cfg.Mode != ModeController && cfg.Mode != ModeNode:
		return nil, invalid("mode %q: want %s, %s or %s", cfg.Mode, ModeAll, ModeController, ModeNode)
	case cfg.NodeID == "" || len(cfg.NodeID) > 256:
		return nil, invalid("node id: want 1 to 256 bytes, got %d", len(cfg.NodeID))
	case !filepath.IsAbs(cfg.PoolDir) || filepath.Clean(cfg.PoolDir) != cfg.PoolDir:
		return nil, invalid("pool directory %q: want a clean absolute path", cfg.PoolDir)
	case cfg.PoolSize != 0 && cfg.PoolSize < pool.MinImageSize:
		return nil, invalid("pool size %d: want at least %d bytes", cfg.PoolSize, pool.MinImageSize)
	case !driverName.MatchString(cfg.DriverName) || strings.Contains(cfg.DriverName, ".."):
		return nil, invalid("driver name %q: want a domain name of at most 63 characters in lower case", cfg.DriverName)
	case cfg.MetadataBlock != 0 && (cfg.MetadataBlock < granule || cfg.MetadataBlock > 1<<30 || cfg.MetadataBlock&(cfg.MetadataBlock-1) != 0):
		return nil, invalid("block size of snapshot metadata %d: want 0, or a power of two from %d to %d", cfg.MetadataBlock, granule, 1<<30)
	case cfg.Images.validate() != nil:
		return nil, cfg.Images.validate()
	case cfg.Routed.validate(cfg.Mode) != nil:
		return nil, cfg.Routed.validate(cfg.Mode)
	case cfg.Crustd != "":
		if _, err := rpc.ParseEndpoint(cfg.Crustd); err != nil {
			return nil, fmt.Errorf("crustd: %w", err)
		}
	}
	switch {
	case cfg.Version == "":
		return nil, invalid("version: want the program's")
	case cfg.Log == nil:
		return nil, invalid("log: want a logger")
	}
	unwatched := func(ctx context.Context) context.Context { return ctx }
	return &Plugin{cfg: cfg, socket: socket, watch: unwatched, boot: bootID}, nil
}

const (
	// stopTimeout is how long calls may take to end after Run's context has.
	stopTimeout = 30 * time.Second
	// closeTimeout is how long closing the pool may take.
	closeTimeout = 30 * time.Second
)

// Run opens the pool, finishes what an earlier process left undone, and serves until ctx ends; then it lets the calls that
// are under way end and closes the pool. It returns nil if ctx has ended it.
func (p *Plugin) Run(ctx context.Context) (err error) {
	ctx = rpc.WithLogger(p.watch(ctx), p.cfg.Log)
	boot, err := p.boot()
	if err != nil {
		return err
	}
	opened, err := pool.Open(ctx, pool.Config{Dir: p.cfg.PoolDir, ImageSize: p.cfg.PoolSize, Log: p.cfg.Log})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		err = errors.Join(err, opened.Close(ctx))
	}()
	objects, err := reflink.Open(opened.Objects())
	if err != nil {
		return err
	}
	quiet, err := newConsistency(p.cfg.Crustd, p.cfg.DriverName)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, quiet.close()) }()
	s := &store{
		catalog: opened.Catalog(), engine: objects, changes: objects, pool: opened.ID(), boot: boot,
		topologyKey: p.cfg.DriverName + "/pool", locks: newLocks(), jobs: &jobs{}, quiet: quiet,
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		err = errors.Join(err, s.jobs.wait(ctx))
	}()
	s.images = newImages(s, opened, p.cfg.Images)
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		err = errors.Join(err, s.images.Stop(ctx))
	}()
	if err := s.recover(ctx); err != nil {
		return err
	}
	stopMetrics, err := serveMetrics(ctx, p.cfg.Metrics, s.images)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopMetrics()) }()
	return p.serve(ctx, s)
}

func (p *Plugin) serve(ctx context.Context, s *store) error {
	l, err := rpc.Listen(ctx, p.socket)
	if err != nil {
		return err
	}
	serveRouted, err := p.listenRouted(ctx, s)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	server := rpc.NewServer(ctx, p.cfg.Log, grpc.ChainUnaryInterceptor(p.watched), grpc.WaitForHandlers(true))
	p.register(server, s)
	p.cfg.Log.InfoContext(ctx, "serving", "pool", string(s.pool), "mode", string(p.cfg.Mode), rpc.LogDriver, p.cfg.DriverName, rpc.LogPath, p.socket)
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() error { return serveRouted(ctx) })
	both.Go(func() error {
		if err := rpc.ServeGRPC(ctx, server, l, stopTimeout); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serve on %s: %w", p.socket, err)
		}
		return nil
	})
	return both.Wait()
}

// watched is the interceptor that calls watch.
func (p *Plugin) watched(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	return next(p.watch(ctx), req)
}

// bootID is the identity of this boot of the machine (random(4), boot_id).
func bootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}
