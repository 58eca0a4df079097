package sandboxes

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	"crust.dev/crust/crust/internal/deferrals"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
)

// watchInterval is how often a sandbox that has lost its connection is looked at: its processes may take a moment to
// end, or its shim to dial again.
const watchInterval = 250 * time.Millisecond

// Config is what a Server works with.
type Config struct {
	Deferrals *deferrals.Manager
	// Handler is the name of the handler that reaches registered shims.
	Handler string
	// Also registers further services on every connection; it may be nil.
	Also func(server *ttrpc.Server)
	Log  *slog.Logger
}

// Server is the shims' side of the daemon.
type Server struct {
	config Config

	mu      sync.Mutex
	current map[string]*connection // by sandbox id; the connection that speaks for it
}

// New returns a server. It does nothing until Serve.
func New(c Config) (*Server, error) {
	if c.Deferrals == nil || c.Handler == "" || c.Log == nil {
		return nil, fmt.Errorf("sandboxes: deferrals, a handler and a logger are needed: %w", errdefs.ErrInvalidArgument)
	}
	return &Server{config: c, current: map[string]*connection{}}, nil
}

// Serve answers shims on a listener, which it closes, until ctx ends. Sandboxes to which volumes are bound and which do
// not register again are watched from the start: they may have ended while no daemon was running.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var watches sync.WaitGroup
	defer watches.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, rec := range s.config.Deferrals.List() {
		if rec.Binding != nil && rec.Handler == s.config.Handler {
			watches.Go(func() { s.watch(ctx, rec.Binding.Sandbox.ID) })
		}
	}
	return rpc.ServeTTRPC(ctx, l, s.config.Log, func(connCtx context.Context, peer rpc.Peer, server *ttrpc.Server) {
		conn := &connection{server: s, peer: peer}
		runtimev1.RegisterTTRPCSandboxesService(server, conn)
		if s.config.Also != nil {
			s.config.Also(server)
		}
		watches.Go(func() {
			<-connCtx.Done()
			if id := s.forget(conn); id != "" {
				s.watch(ctx, id)
			}
		})
	})
}

// admit makes conn the one that speaks for a sandbox. A living process that has registered the same id before, and is
// not the one that does now, keeps it.
func (s *Server) admit(conn *connection, claimant deferrals.Claimant) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if conn.claimant.Sandbox.ID != "" && conn.claimant.Sandbox.ID != claimant.Sandbox.ID {
		return fmt.Errorf("this connection speaks for sandbox %s: %w", conn.claimant.Sandbox.ID, errdefs.ErrFailedPrecondition)
	}
	if old := s.current[claimant.Sandbox.ID]; old != nil && old != conn && old.peer.PID != conn.peer.PID {
		for _, p := range old.claimant.Processes {
			if alive, err := p.Alive(); alive || err != nil {
				return fmt.Errorf("sandbox %s belongs to process %s, which is alive; choose another id: %w", claimant.Sandbox.ID, p, errdefs.ErrAlreadyExists)
			}
		}
	}
	conn.claimant = claimant
	s.current[claimant.Sandbox.ID] = conn
	return nil
}

// forget returns the sandbox that has lost its connection, if conn was the one that spoke for it.
func (s *Server) forget(conn *connection) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := conn.claimant.Sandbox.ID
	if id == "" || s.current[id] != conn {
		return ""
	}
	delete(s.current, id)
	return id
}

func (s *Server) connected(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current[id] != nil
}

// watch takes a sandbox's volumes back once its processes have ended, unless it registers again before.
func (s *Server) watch(ctx context.Context, id string) {
	log := s.config.Log.With(rpc.LogSandbox, id)
	reason := ""
	for !s.connected(id) {
		err := s.config.Deferrals.SandboxGone(ctx, id)
		if err == nil {
			log.InfoContext(ctx, "sandbox has ended")
			return
		}
		if text := err.Error(); text != reason && ctx.Err() == nil {
			reason = text
			log.WarnContext(ctx, "sandbox has lost its connection and still holds volumes", rpc.LogError, err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(watchInterval):
		}
	}
}
