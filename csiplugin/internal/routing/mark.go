package routing

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// KeepaliveTime is how often the router asks a node, in the middle of a call, whether it is still there.
const KeepaliveTime = 20 * time.Second

// mark is in the trailer of every answer of a node; its value is the node's pool. An error without it comes from the way there.
const mark = "crust-pool"

// Answered says whether a call was answered by a node, given the trailer that came with it.
func Answered(trailer metadata.MD) bool { return len(trailer.Get(mark)) > 0 }

// Marks are a server's options that mark its answers.
func Marks(pool string) []grpc.ServerOption {
	trailer := metadata.Pairs(mark, pool)
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := grpc.SetTrailer(ctx, trailer); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			stream.SetTrailer(trailer)
			return next(srv, stream)
		}),
	}
}
