package routing

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// KeepaliveTime is how often the router asks a node, in the middle of a call, whether it is still there.
const KeepaliveTime = 20 * time.Second

// mark is in the trailer of every answer of a node; its value is the node's pool. An error without it comes from the way there.
// It is in the header of every call of a router, too; its value is the pool that the router means.
const mark = "crust-pool"

// Answered says whether a call was answered by a node, given the trailer that came with it.
func Answered(trailer metadata.MD) bool { return len(trailer.Get(mark)) > 0 }

// Marks are a server's options that mark its answers, and refuse calls that mean another pool. That is ErrUnavailable, before anything
// is done: the router took this node for that pool's, and "not found" would be read as "gone", or as a volume that never grows.
func Marks(pool string) []grpc.ServerOption {
	trailer := metadata.Pairs(mark, pool)
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := grpc.SetTrailer(ctx, trailer); err != nil {
				return nil, err
			}
			if err := meant(ctx, pool); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			stream.SetTrailer(trailer)
			if err := meant(stream.Context(), pool); err != nil {
				return err
			}
			return next(srv, stream)
		}),
	}
}

// meant returns nil if a call means a pool.
func meant(ctx context.Context, pool string) error {
	switch asked := metadata.ValueFromIncomingContext(ctx, mark); {
	case len(asked) != 1:
		return fmt.Errorf("the call does not say which pool it means; this node has pool %s; the router is of another version than this crust-csi, upgrade the older one: %w", pool, errdefs.ErrUnavailable)
	case asked[0] != pool:
		return fmt.Errorf("the router takes this node for the one of pool %s, and it has pool %s; the label of its Node object is out of date, correct or remove it: %w",
			asked[0], pool, errdefs.ErrUnavailable)
	}
	return nil
}

// Means are a client's options that say in every call which pool is meant.
func Means(pool string) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return invoke(metadata.AppendToOutgoingContext(ctx, mark, pool), method, req, reply, conn, opts...)
		}),
		grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(metadata.AppendToOutgoingContext(ctx, mark, pool), desc, conn, method, opts...)
		}),
	}
}
