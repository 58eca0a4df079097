package router

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/routing"
	"crust.dev/crust/protocol/rpc"
)

// place is where a pool is.
type place struct {
	node string
	// address is host:port.
	address string
}

// link is a connection to the node that has a pool. It connects again by itself.
type link struct {
	place
	pool handle.Pool
	conn *grpc.ClientConn
}

const (
	// connectTime is how long a node may take to take a connection, less than a sidecar waits for an answer.
	connectTime = 5 * time.Second
	// connectPause is the longest pause between attempts to connect to a node that is gone, during which calls fail at once.
	connectPause = 5 * time.Second
	// keepaliveTimeout is how long a node may be silent in the middle of a call after it was asked whether it is still there.
	keepaliveTimeout = 10 * time.Second
)

// link returns the connection to the node that has a pool now.
func (r *Router) link(ctx context.Context, pool handle.Pool) (*link, error) {
	at, err := r.pools.find(ctx, pool)
	if err != nil {
		return nil, err
	}
	return r.dial(pool, at)
}

// dial returns the connection to a node, which is where a pool is now.
func (r *Router) dial(pool handle.Pool, at place) (*link, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.links[pool]
	if old != nil && old.place == at {
		return old, nil
	}
	retry := backoff.DefaultConfig
	retry.BaseDelay, retry.MaxDelay = connectPause/10, connectPause
	conn, err := grpc.NewClient("passthrough:///"+at.address, append(routing.Means(string(pool)),
		grpc.WithTransportCredentials(r.cfg.Files.Credentials(routing.NodeName(r.cfg.DriverName), r.cfg.Log)), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(rpc.MaxMessage), grpc.MaxCallSendMsgSize(rpc.MaxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: retry, MinConnectTimeout: connectTime}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: routing.KeepaliveTime, Timeout: keepaliveTimeout}))...)
	if err != nil {
		return nil, fmt.Errorf("connect to node %s at %s: %w", at.node, at.address, err)
	}
	l := &link{place: at, pool: pool, conn: conn}
	r.links[pool] = l
	if old != nil {
		err = old.conn.Close() // what is under way there has lost its pool
	}
	return l, err
}

// hangUp closes all connections.
func (r *Router) hangUp() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, l := range r.links {
		errs = append(errs, l.conn.Close())
	}
	clear(r.links)
	return errors.Join(errs...)
}

// fault is the error of a call to the node as our caller is to see it: unchanged if the node has answered.
func (l *link) fault(ctx context.Context, err error, trailer metadata.MD) error {
	switch {
	case err == nil:
		return nil
	case routing.Answered(trailer):
		return rpc.Relay(err)
	case ctx.Err() != nil:
		return fmt.Errorf("node %s with pool %s: %w", l.node, l.pool, ctx.Err())
	}
	return fmt.Errorf("the crust-csi of node %s, which has pool %s, does not answer at %s; see that it runs there with --route-listen, that the port can be reached, and that each side's certificate is of an authority that the other one has: %s: %w",
		l.node, l.pool, l.address, status.Convert(err).Message(), errdefs.ErrUnavailable)
}
