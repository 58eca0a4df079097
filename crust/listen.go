package crust

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"crust.dev/crust/crust/internal/admin"
	"crust.dev/crust/crust/internal/kube/registration"
	"crust.dev/crust/crust/internal/proxy"
	"crust.dev/crust/crust/internal/runtimeapi"
	"crust.dev/crust/crust/internal/sandboxes"
	"crust.dev/crust/crust/internal/status"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
)

// services opens sockets and collects what is to run on them.
type services struct {
	daemon    *Daemon
	parts     *parts
	follower  *follower // nil without a configuration file
	checks    status.Checks
	listeners []net.Listener
	run       []func(context.Context) error
}

// listen opens all sockets before anything is served: whoever finds one finds all. It returns what has to run.
func (d *Daemon) listen(ctx context.Context, p *parts) (_ []func(context.Context) error, err error) {
	s := &services{daemon: d, parts: p}
	if d.config.File != nil {
		s.follower = &follower{daemon: d, parts: p}
		s.run = append(s.run, s.follower.run)
	}
	defer func() {
		if err != nil {
			for _, l := range s.listeners {
				err = errors.Join(err, l.Close())
			}
		}
	}()
	for _, open := range []func(context.Context) error{s.shims, s.drivers, s.kep, s.http, s.admin} {
		if err := open(ctx); err != nil {
			return nil, err
		}
	}
	return s.run, nil
}

func (s *services) open(ctx context.Context, path string) (net.Listener, error) {
	// A directory that exists keeps its mode.
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := rpc.Listen(ctx, path)
	if err == nil {
		s.listeners = append(s.listeners, l)
	}
	return l, err
}

func (s *services) grpc(ctx context.Context, path string, server *grpc.Server) error {
	healthv1.RegisterHealthServer(server, &status.Health{Checks: s.checks})
	l, err := s.open(ctx, path)
	if err == nil {
		s.run = append(s.run, func(ctx context.Context) error { return rpc.ServeGRPC(ctx, server, l, stopTimeout) })
	}
	return err
}

// shims serves the sandboxes' shims.
func (s *services) shims(ctx context.Context) error {
	config := s.daemon.config
	kep := runtimeapi.New(s.parts.manager, config.DefaultHandler)
	server, err := sandboxes.New(sandboxes.Config{
		Deferrals: s.parts.manager,
		Handler:   config.ShimHandler,
		Log:       config.Log,
		Also:      func(t *ttrpc.Server) { runtimev1.RegisterTTRPCRuntimeService(t, kep) },
	})
	if err != nil {
		return err
	}
	l, err := s.open(ctx, s.daemon.sockets.runtime)
	if err == nil {
		s.run = append(s.run, func(ctx context.Context) error { return server.Serve(ctx, l) })
	}
	return err
}

// drivers serves CSI in each driver's place, and registers it with the kubelet.
func (s *services) drivers(ctx context.Context) error {
	config := s.daemon.config
	for i, sockets := range s.daemon.sockets.drivers {
		provider := s.parts.providers[i]
		s.checks = append(s.checks, status.Check{Name: "driver " + sockets.upstream, Run: provider.Probe})
		if config.Drivers[i].Register {
			r, err := registration.New(registration.Config{
				Dir: config.RegistrationDir, Endpoint: sockets.endpoint, Name: provider.Name, Answered: s.parts.metrics.Registration, Log: config.Log,
			})
			if err != nil {
				return err
			}
			s.checks = append(s.checks, status.Check{Name: "registration of " + sockets.endpoint, Run: func(context.Context) error { return r.Ready() }})
			s.run = append(s.run, r.Run)
		}
	}
	if pods := s.parts.pods; pods != nil {
		s.checks = append(s.checks, status.Check{Name: "kubernetes", Run: pods.Ready})
	}
	for i, sockets := range s.daemon.sockets.drivers {
		server, err := proxy.NewServer(ctx, proxy.Config{Provider: s.parts.providers[i], Deferrals: s.parts.manager, Policy: s.parts.policy, Log: config.Log})
		if err != nil {
			return err
		}
		if err := s.grpc(ctx, sockets.endpoint, server); err != nil {
			return err
		}
	}
	return nil
}

// kep serves drivers that call by themselves.
func (s *services) kep(ctx context.Context) error {
	if s.daemon.sockets.kep == "" {
		return nil
	}
	server := rpc.NewServer(ctx, s.daemon.config.Log)
	runtimev1.RegisterRuntimeServer(server, runtimeapi.New(s.parts.manager, s.daemon.config.DefaultHandler).GRPC())
	runtimev1.RegisterConsistencyServer(server, runtimeapi.NewConsistency(s.parts.manager))
	return s.grpc(ctx, s.daemon.sockets.kep, server)
}

// admin serves crustctl.
func (s *services) admin(ctx context.Context) error {
	if s.daemon.sockets.admin == "" {
		return nil
	}
	// The configuration is no part of readiness: a daemon that goes on with the old one is not to be restarted or replaced.
	checks := slices.Clone(s.checks)
	if s.follower != nil {
		checks = append(checks, status.Check{Name: "configuration", Run: s.follower.check})
	}
	server := rpc.NewServer(ctx, s.daemon.config.Log)
	adminv1.RegisterAdminServer(server, admin.New(admin.Config{
		Deferrals:      s.parts.manager,
		Checks:         checks,
		Describe:       s.describe,
		Handlers:       s.daemon.config.Handlers,
		RuntimeClasses: func() map[string]string { return s.parts.policy.Rules().RuntimeClasses },
	}))
	return s.grpc(ctx, s.daemon.sockets.admin, server)
}

func (s *services) describe(ctx context.Context) *adminv1.GetStatusResponse {
	config := s.daemon.config
	resp := &adminv1.GetStatusResponse{
		Version:         config.Version,
		StateDir:        config.StateDir,
		RuntimeEndpoint: s.daemon.sockets.runtime,
		KepEndpoint:     s.daemon.sockets.kep,
		DefaultPolicy:   s.parts.policy.Rules().Default,
		DefaultHandler:  config.DefaultHandler,
	}
	if config.File != nil {
		resp.ConfigFile = config.File.Path
	}
	for i, sockets := range s.daemon.sockets.drivers {
		name, _ := s.parts.providers[i].Name(ctx) // one that does not answer is a failed check
		resp.Drivers = append(resp.Drivers, &adminv1.Driver{Name: name, Endpoint: sockets.endpoint, Upstream: sockets.upstream})
	}
	return resp
}

// http serves health and metrics.
func (s *services) http(ctx context.Context) error {
	if s.daemon.config.HTTPAddress == "" {
		return nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", s.daemon.config.HTTPAddress)
	if err != nil {
		return fmt.Errorf("http: %w", err)
	}
	s.listeners = append(s.listeners, l)
	server := status.Server{Checks: s.checks, Registry: s.parts.metrics.Registry, Profiling: s.daemon.config.Profiling}
	s.run = append(s.run, func(ctx context.Context) error { return server.Serve(ctx, l) })
	return nil
}
