// Package status collects whether what a daemon depends on is in order, and tells it over HTTP: /healthz (the process
// runs), /readyz (everything is in order, or what is not), /metrics, and on request /debug/pprof.
package status

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// checkTimeout bounds one check.
const checkTimeout = 5 * time.Second

// Check is one thing that has to be in order.
type Check struct {
	Name string
	Run  func(ctx context.Context) error
}

// Result is how a check went.
type Result struct {
	Name string
	Err  error
}

// Checks are all of them.
type Checks []Check

// Run runs all checks at the same time.
func (c Checks) Run(ctx context.Context) []Result {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	results := make([]Result, len(c))
	var work sync.WaitGroup
	for i, check := range c {
		work.Go(func() { results[i] = Result{check.Name, check.Run(ctx)} })
	}
	work.Wait()
	return results
}

// Health is the gRPC health service (grpc.health.v1) for the same checks.
type Health struct {
	healthv1.UnimplementedHealthServer
	Checks Checks
}

// Check says SERVING if everything is in order, whatever service is asked for.
func (h Health) Check(ctx context.Context, _ *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	for _, r := range h.Checks.Run(ctx) {
		if r.Err != nil {
			return &healthv1.HealthCheckResponse{Status: healthv1.HealthCheckResponse_NOT_SERVING}, nil
		}
	}
	return &healthv1.HealthCheckResponse{Status: healthv1.HealthCheckResponse_SERVING}, nil
}

// Server answers over HTTP.
type Server struct {
	Checks   Checks
	Registry *prometheus.Registry
	// Profiling serves /debug/pprof.
	Profiling bool
}

// Handler returns the handler of all paths.
func (s Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", s.ready)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.Registry, promhttp.HandlerOpts{}))
	if s.Profiling {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

func (s Server) ready(w http.ResponseWriter, r *http.Request) {
	results := s.Checks.Run(r.Context())
	for _, result := range results {
		if result.Err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			break
		}
	}
	for _, result := range results {
		if result.Err != nil {
			fmt.Fprintf(w, "[-] %s: %v\n", result.Name, result.Err)
		} else {
			fmt.Fprintf(w, "[+] %s\n", result.Name)
		}
	}
}

// Serve answers on a listener, which it closes, until ctx ends.
func (s Server) Serve(ctx context.Context, l net.Listener) error {
	server := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() {
		stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if server.Shutdown(stopCtx) != nil {
			_ = server.Close()
		}
	})
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("http on %s: %w", l.Addr(), err)
	}
	return nil
}
