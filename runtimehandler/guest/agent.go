package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/guest/channel"
	"crust.dev/crust/runtimehandler/guest/device"
	"crust.dev/crust/runtimehandler/guest/modules"
	"crust.dev/crust/runtimehandler/guest/process"
)

// The defaults of [Config].
const (
	DefaultPort      = "crust.agent.0" // name of the virtio-serial port
	DefaultVsockPort = 52601
)

// hangUpTimeout is how long the host has to hang up after the answer to Shutdown.
const hangUpTimeout = 2 * time.Second

// Config is how an agent is reached and what it is for.
type Config struct {
	// Version is what GetInfo says.
	Version string
	// Port is the name of a virtio-serial port on which to serve; empty is none.
	Port string
	// VsockPort is the vsock port on which to serve; 0 is none.
	VsockPort uint32
	// VsockPeer is the context id that may connect; the host's, but for tests.
	VsockPeer uint32
	// Modules has the kernel modules for filesystems.
	Modules modules.Dir
	// Dedicated says that the guest exists for the agent only: Shutdown may then end processes that are not the agent's.
	Dedicated bool
	Log       *slog.Logger
}

// Agent serves crust.guest.v1.Agent.
type Agent struct {
	config   Config
	devices  device.Finder
	commands process.Table
	shutdown chan struct{} // closed when Shutdown has succeeded
	hungUp   chan struct{} // gets a token when a connection has ended after that

	mu           sync.Mutex
	volumes      map[string]*volume // by mount path
	serials      map[string]string  // mount path by serial
	destinations map[string]string  // mount path by where it is bound to
	mounts       int                // how many mounts there have been
	stopping     bool
}

var _ guestv1.TTRPCAgentService = (*Agent)(nil)

// New returns an agent, which does nothing before Run.
func New(c Config) (*Agent, error) {
	if c.Port == "" && c.VsockPort == 0 {
		return nil, errors.New("agent: neither a virtio-serial port nor a vsock port to serve on")
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return &Agent{
		config:       c,
		shutdown:     make(chan struct{}),
		hungUp:       make(chan struct{}, 1),
		volumes:      map[string]*volume{},
		serials:      map[string]string{},
		destinations: map[string]string{},
	}, nil
}

// Run serves until ctx ends or Shutdown was answered. What is mounted then stays mounted.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var lines []func(context.Context) error
	if a.config.Port != "" {
		lines = append(lines, a.servePort)
	}
	if a.config.VsockPort != 0 {
		lines = append(lines, a.serveVsock)
	}
	ended := make(chan error, len(lines))
	for _, serve := range lines {
		go func() { ended <- serve(ctx) }()
	}
	var errs []error
	select {
	case <-a.shutdown:
		a.awaitHangUp(ctx)
	case <-ctx.Done():
	case err := <-ended:
		errs = append(errs, err)
	}
	cancel()
	for len(errs) < len(lines) {
		errs = append(errs, <-ended)
	}
	return errors.Join(errs...)
}

// awaitHangUp gives the answer to Shutdown time to arrive: whoever asked hangs up when it has.
func (a *Agent) awaitHangUp(ctx context.Context) {
	timeout := time.NewTimer(hangUpTimeout)
	defer timeout.Stop()
	select {
	case <-a.hungUp:
	case <-timeout.C:
	case <-ctx.Done():
	}
}

// servePort serves one connection of the host after the other.
func (a *Agent) servePort(ctx context.Context) error {
	port := channel.Port{Name: a.config.Port}
	for {
		conn, err := port.Accept(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		a.serve(ctx, conn)
	}
}

// serveVsock serves all connections of the host.
func (a *Agent) serveVsock(ctx context.Context) error {
	l, err := channel.ListenVsock(ctx, a.config.VsockPort)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept on vsock port %d: %w", a.config.VsockPort, err)
		}
		if err := channel.CheckPeer(conn, a.config.VsockPeer); err != nil {
			a.config.Log.WarnContext(ctx, "connection refused", rpc.LogError, err)
			_ = conn.Close()
			continue
		}
		conns.Go(func() { a.serve(ctx, conn) })
	}
}

func (a *Agent) serve(ctx context.Context, conn net.Conn) {
	err := rpc.ServeTTRPCConn(ctx, conn, a.config.Log, func(_ context.Context, s *ttrpc.Server) {
		guestv1.RegisterTTRPCAgentService(s, a)
	})
	if err != nil {
		a.config.Log.WarnContext(ctx, "connection ended", rpc.LogError, err)
	}
	select {
	case <-a.shutdown:
		select {
		case a.hungUp <- struct{}{}:
		default:
		}
	default:
	}
}
