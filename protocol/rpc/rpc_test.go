package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
)

// agent answers GetInfo the way a test wants.
type agent struct {
	guestv1.TTRPCAgentService // nil: nothing else is called
	answer                    func(ctx context.Context) error
}

func (a *agent) GetInfo(ctx context.Context, _ *guestv1.GetInfoRequest) (*guestv1.GetInfoResponse, error) {
	return &guestv1.GetInfoResponse{}, a.answer(ctx)
}

// grpcAgent is the same for gRPC.
type grpcAgent struct {
	guestv1.UnimplementedAgentServer
	a *agent
}

func (g grpcAgent) GetInfo(ctx context.Context, req *guestv1.GetInfoRequest) (*guestv1.GetInfoResponse, error) {
	return g.a.GetInfo(ctx, req)
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// serve starts an agent on both transports and returns a call on each.
func serve(t *testing.T, log *slog.Logger, a *agent) map[string]func(ctx context.Context) error {
	t.Helper()
	dir, err := os.MkdirTemp("", "rpc-")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
		_ = os.Remove(dir)
	})
	listen := func(name string) (string, net.Listener) {
		path := filepath.Join(dir, name)
		l, err := rpc.Listen(ctx, path)
		if err != nil {
			t.Fatal(err)
		}
		return path, l
	}
	grpcPath, grpcListener := listen("grpc")
	server := rpc.NewServer(ctx, log)
	guestv1.RegisterAgentServer(server, grpcAgent{a: a})
	go func() { done <- rpc.ServeGRPC(ctx, server, grpcListener, time.Second) }()
	ttrpcPath, ttrpcListener := listen("ttrpc")
	go func() {
		done <- rpc.ServeTTRPC(ctx, ttrpcListener, log, func(_ context.Context, _ rpc.Peer, s *ttrpc.Server) {
			guestv1.RegisterTTRPCAgentService(s, a)
		})
	}()

	conn, err := rpc.Dial(grpcPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client, err := rpc.DialTTRPC(ctx, ttrpcPath)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return map[string]func(context.Context) error{
		"grpc": func(ctx context.Context) error {
			_, err := guestv1.NewAgentClient(conn).GetInfo(ctx, &guestv1.GetInfoRequest{})
			return err
		},
		"ttrpc": func(ctx context.Context) error {
			_, err := guestv1.NewTTRPCAgentClient(client).GetInfo(ctx, &guestv1.GetInfoRequest{})
			return err
		},
	}
}

func TestErrorsTravel(t *testing.T) {
	foreign := status.Error(codes.NotFound, "somebody else's")
	a := &agent{}
	calls := serve(t, quiet(), a)
	for _, tc := range []struct {
		name string
		err  error
		code codes.Code
		kind error
	}{
		{"success", nil, codes.OK, nil},
		{"a kind", fmt.Errorf("volume v: %w", errdefs.ErrFailedPrecondition), codes.FailedPrecondition, errdefs.ErrFailedPrecondition},
		{"a joined kind", errors.Join(errors.New("x"), errdefs.ErrOutOfRange), codes.OutOfRange, errdefs.ErrOutOfRange},
		{"no kind", errors.New("x"), codes.Internal, errdefs.ErrInternal},
		{"a missing file is not 'already gone'", fmt.Errorf("open: %w", os.ErrNotExist), codes.Internal, errdefs.ErrInternal},
		{"the same, bare", os.ErrNotExist, codes.Internal, errdefs.ErrInternal},
		{"a forbidden file", os.ErrPermission, codes.Internal, errdefs.ErrInternal},
		{"cancelled", fmt.Errorf("x: %w", context.Canceled), codes.Canceled, context.Canceled},
		{"a foreign status does not leak", fmt.Errorf("call: %w", foreign), codes.Internal, errdefs.ErrInternal},
		{"a method that a service lacks", status.Error(codes.Unimplemented, "GetInfo"), codes.Unimplemented, errdefs.ErrNotImplemented},
		{"a foreign status that was translated", rpc.FromWire(foreign), codes.NotFound, errdefs.ErrNotFound},
		{"a foreign status that is relayed", rpc.Relay(foreign), codes.NotFound, errdefs.ErrNotFound},
	} {
		for transport, call := range calls {
			t.Run(tc.name+"/"+transport, func(t *testing.T) {
				a.answer = func(context.Context) error { return tc.err }
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				err := call(ctx)
				if got := status.Code(err); got != tc.code {
					t.Errorf("code %v (%v), want %v", got, err, tc.code)
				}
				err = rpc.FromWire(err)
				if tc.kind == nil {
					if err != nil {
						t.Errorf("error %v", err)
					}
					return
				}
				if !errors.Is(err, tc.kind) {
					t.Errorf("kind of %v is not %v", err, tc.kind)
				}
				if _, ok := status.FromError(err); ok {
					t.Error("the status is still in the error")
				}
			})
		}
	}
}

func TestCallsHaveDeadlines(t *testing.T) {
	a := &agent{answer: func(ctx context.Context) error {
		if _, ok := ctx.Deadline(); !ok {
			return errors.New("no deadline")
		}
		return nil
	}}
	calls := serve(t, quiet(), a)
	if err := calls["grpc"](t.Context()); err != nil {
		t.Errorf("a gRPC call without a deadline was not given one: %v", err)
	}
	if err := calls["ttrpc"](t.Context()); !errors.Is(err, errdefs.ErrInternal) {
		t.Errorf("a ttrpc call without a deadline was let through: %v", err)
	}
}

func TestOneLinePerCall(t *testing.T) {
	var lines strings.Builder
	a := &agent{answer: func(context.Context) error { return fmt.Errorf("disk full: %w", errdefs.ErrResourceExhausted) }}
	calls := serve(t, slog.New(slog.NewTextHandler(&lines, nil)), a)
	if err := calls["grpc"](t.Context()); err == nil {
		t.Fatal("no error")
	}
	got := lines.String()
	for _, want := range []string{"level=WARN", "method=/crust.guest.v1.Agent/GetInfo", "code=ResourceExhausted", "disk full"} {
		if !strings.Contains(got, want) {
			t.Errorf("the line %q lacks %q", got, want)
		}
	}
	if n := strings.Count(got, "\n"); n != 1 {
		t.Errorf("%d lines: %s", n, got)
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	l, err := rpc.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if _, err := rpc.Listen(t.Context(), path); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("a second listener: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // as if it was killed
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l, err = rpc.Listen(t.Context(), path)
	if err != nil {
		t.Fatalf("the socket of a dead process is in the way: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := rpc.Listen(t.Context(), path); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("over a file: %v", err)
	}
	if content, err := os.ReadFile(path); err != nil || string(content) != "precious" {
		t.Errorf("the file is now %q, %v", content, err)
	}
}

func TestParseEndpoint(t *testing.T) {
	for _, tc := range []struct{ endpoint, want string }{
		{"unix:///run/a.sock", "/run/a.sock"},
		{"unix:/run/a.sock", "/run/a.sock"},
		{"/run/a.sock", "/run/a.sock"},
		{"unix://run/a.sock", ""},
		{"tcp://127.0.0.1:1", ""},
		{"unix:///run/../a.sock", ""},
		{"", ""},
		{"unix:///" + strings.Repeat("a", 106), "/" + strings.Repeat("a", 106)},
		{"unix:///" + strings.Repeat("a", 107), ""},
	} {
		got, err := rpc.ParseEndpoint(tc.endpoint)
		if got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("ParseEndpoint(%q) = %q, %v; want %q", tc.endpoint, got, err, tc.want)
		}
		if err != nil && !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("ParseEndpoint(%q): kind of %v", tc.endpoint, err)
		}
	}
}

// TestPeerThatStopsReading: ttrpc writes under a lock without looking at the caller's deadline.
func TestPeerThatStopsReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer theirs.Close()
		client := rpc.NewTTRPCClient(ours)
		defer client.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err := guestv1.NewTTRPCAgentClient(client).GetInfo(ctx, &guestv1.GetInfoRequest{})
		if err == nil {
			t.Fatal("a call to nobody succeeded")
		}
		if waited := time.Since(start); waited > time.Minute {
			t.Errorf("the call took %v", waited)
		}
	})
}

func TestConnectionEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := rpc.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan rpc.Peer, 1)
	served := make(chan error, 1)
	go func() {
		served <- rpc.ServeTTRPC(ctx, l, quiet(), func(ctx context.Context, peer rpc.Peer, _ *ttrpc.Server) {
			context.AfterFunc(ctx, func() { ended <- peer })
		})
	}()
	client, err := rpc.DialTTRPC(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if peer := <-ended; peer.PID != os.Getpid() {
		t.Errorf("the peer was %+v, want ourselves", peer)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
