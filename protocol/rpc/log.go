package rpc

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc/codes"
)

// The keys under which facts are logged.
const (
	LogMethod   = "method"
	LogVolume   = "volume"
	LogTarget   = "target"
	LogSandbox  = "sandbox"
	LogDriver   = "driver"
	LogDevice   = "device"
	LogCode     = "code"
	LogDuration = "duration"
	LogError    = "error"
	LogPath     = "path"
	LogSize     = "size"
)

// Observer is told of every call that a server has answered: the full name of its method, how it ended, and how long it
// took. It must not block.
type Observer func(method string, code codes.Code, took time.Duration)

type observerKey struct{}

// WithObserver returns a context under which servers tell an observer of their calls.
func WithObserver(ctx context.Context, o Observer) context.Context {
	return context.WithValue(ctx, observerKey{}, o)
}

func observe(ctx context.Context, method string, err error, start time.Time) {
	if o, ok := ctx.Value(observerKey{}).(Observer); ok {
		o(method, Code(err), time.Since(start))
	}
}

type loggerKey struct{}

// WithLogger returns a context that carries a logger.
func WithLogger(ctx context.Context, log *slog.Logger) context.Context {
	return context.WithValue(ctx, loggerKey{}, log)
}

// Logger returns the logger that a context carries, or the default one.
func Logger(ctx context.Context) *slog.Logger {
	if log, ok := ctx.Value(loggerKey{}).(*slog.Logger); ok {
		return log
	}
	return slog.Default()
}
