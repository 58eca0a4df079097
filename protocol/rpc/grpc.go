package rpc

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/protocol/rpc/crashpoint"
)

// MaxMessage is the largest message in bytes that our gRPC servers and clients take. A CSI message is bounded by the
// CSI specification's size limits to far less; lists and metadata streams are cut by their handlers.
const MaxMessage = 16 << 20

// defaultDeadline bounds a call whose caller set no deadline. It is that of the kubelet for CSI calls.
const defaultDeadline = 2 * time.Minute

// NewServer returns a gRPC server that admits root and our own user only, gives every unary call a deadline and a
// logger, logs it in one line, and maps error kinds to codes. What ctx carries for crashpoint.At, calls carry too; an
// observer in ctx is told of them.
func NewServer(ctx context.Context, log *slog.Logger, opts ...grpc.ServerOption) *grpc.Server {
	base := []grpc.ServerOption{
		grpc.Creds(peerCredentials{}),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.ChainUnaryInterceptor(unaryServer(ctx, log)),
		grpc.ChainStreamInterceptor(streamServer(ctx, log)),
	}
	return grpc.NewServer(append(base, opts...)...)
}

// Dial returns a client connection to the unix socket at path. It connects on first use and again when the connection
// breaks, so it outlives restarts of its peer. The peer must be root or our own user.
func Dial(path string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	base := []grpc.DialOption{
		grpc.WithTransportCredentials(peerCredentials{}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithNoProxy(),
	}
	return grpc.NewClient("unix:"+path, append(base, opts...)...)
}

func unaryServer(base context.Context, log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		ctx, cancel := withDefaultDeadline(ctx)
		defer cancel()
		start := time.Now()
		resp, err := handler(WithLogger(crashpoint.Carry(ctx, base), log), req)
		logCall(ctx, log, info.FullMethod, req, start, err)
		observe(base, info.FullMethod, err, start)
		return resp, toWire(err)
	}
}

func streamServer(base context.Context, log *slog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := WithLogger(stream.Context(), log)
		start := time.Now()
		err := handler(srv, &loggedStream{ServerStream: stream, ctx: ctx})
		logCall(ctx, log, info.FullMethod, nil, start, err)
		observe(base, info.FullMethod, err, start)
		return toWire(err)
	}
}

type loggedStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // it replaces the stream's own, as grpc.ServerStream demands
}

func (s *loggedStream) Context() context.Context { return s.ctx }

func withDefaultDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, defaultDeadline)
}

// quiet are calls that come every few seconds and say nothing when they succeed.
var quiet = map[string]bool{
	"/csi.v1.Identity/Probe":                true,
	"/csi.v1.Node/NodeGetCapabilities":      true,
	"/csi.v1.Node/NodeGetVolumeStats":       true,
	"/crust.guest.v1.Agent/ReadExec":        true,
	"/crust.guest.v1.Agent/WriteExec":       true,
	"/crust.guest.v1.Agent/GetVolumeStats":  true,
	"/crust.runtime.v1.Shim/GetVolumeStats": true,
}

// logCall writes the one line that each call gets. Of a request it shows the volume's id and target path and nothing
// else, because requests carry secrets.
func logCall(ctx context.Context, log *slog.Logger, method string, req any, start time.Time, err error) {
	attrs := []slog.Attr{
		slog.String(LogMethod, method),
		slog.String(LogCode, Code(err).String()),
		slog.Duration(LogDuration, time.Since(start)),
	}
	if r, ok := req.(interface{ GetVolumeId() string }); ok && r.GetVolumeId() != "" {
		attrs = append(attrs, slog.String(LogVolume, r.GetVolumeId()))
	}
	if r, ok := req.(interface{ GetTargetPath() string }); ok && r.GetTargetPath() != "" {
		attrs = append(attrs, slog.String(LogTarget, r.GetTargetPath()))
	}
	level := slog.LevelInfo
	switch Code(err) {
	case codes.OK:
		if quiet[method] {
			level = slog.LevelDebug
		}
	case codes.Internal, codes.DataLoss, codes.Unknown:
		level = slog.LevelError
	default:
		level = slog.LevelWarn
	}
	if err != nil {
		attrs = append(attrs, slog.String(LogError, err.Error()))
	}
	log.LogAttrs(ctx, level, "rpc", attrs...)
}

// ServeGRPC serves until ctx ends, then waits for calls in flight, at most for stopTimeout. It closes the listener.
func ServeGRPC(ctx context.Context, server *grpc.Server, l net.Listener, stopTimeout time.Duration) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		force := time.AfterFunc(stopTimeout, server.Stop)
		defer force.Stop()
		server.GracefulStop()
	})
	err := server.Serve(l)
	if !stop() {
		<-stopped
	}
	if errors.Is(err, grpc.ErrServerStopped) { // ctx had ended before
		return nil
	}
	return err
}
