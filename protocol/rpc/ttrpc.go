package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	containerdlog "github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
)

// writeTimeout is how long a message may take to leave this process. ttrpc writes while it holds a lock and does not
// look at the caller's deadline, so without it a peer that has stopped reading would block every later call for ever.
const writeTimeout = 20 * time.Second

// ServeTTRPC accepts connections until ctx ends, admits root and our own user, and gives each connection a ttrpc server
// of its own: register is called once per connection, so that the services it registers know who their caller is.
// The context that it gets ends with the connection. ServeTTRPC closes the listener and returns when all connections
// have been closed.
func ServeTTRPC(ctx context.Context, l net.Listener, log *slog.Logger, register func(ctx context.Context, peer Peer, server *ttrpc.Server)) error {
	var conns sync.WaitGroup
	defer conns.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept on %s: %w", l.Addr(), err)
		}
		peer, err := peerOf(conn)
		if err != nil {
			log.WarnContext(ctx, "connection refused", LogError, err)
			_ = conn.Close()
			continue
		}
		conns.Go(func() {
			err := ServeTTRPCConn(ctx, conn, log, func(ctx context.Context, s *ttrpc.Server) { register(ctx, peer, s) })
			if err != nil {
				log.WarnContext(ctx, "connection ended", LogError, err)
			}
		})
	}
}

// ServeTTRPCConn serves one connection, whatever it runs over, until it breaks or ctx ends; it closes it.
func ServeTTRPCConn(ctx context.Context, conn net.Conn, log *slog.Logger, register func(ctx context.Context, server *ttrpc.Server)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(unaryTTRPC(log)))
	if err != nil {
		return errors.Join(fmt.Errorf("ttrpc server: %w", err), conn.Close())
	}
	register(ctx, server)
	once := &onceListener{conn: &watchedConn{Conn: conn, closed: make(chan struct{})}}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	err = server.Serve(withoutTTRPCLog(ctx), once)
	_ = once.conn.Close()
	if errors.Is(err, ttrpc.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// DialTTRPC connects to the unix socket at path. The client is good for this one connection: when Call fails with
// ErrUnavailable, dial again. Every call must have a deadline; cancelling it does not reach the peer.
func DialTTRPC(ctx context.Context, path string, opts ...ttrpc.ClientOpts) (*ttrpc.Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w: %w", path, err, errdefs.ErrUnavailable)
	}
	if _, err := peerOf(conn); err != nil {
		return nil, errors.Join(fmt.Errorf("dial %s: %w", path, err), conn.Close())
	}
	return NewTTRPCClient(conn, opts...), nil
}

// NewTTRPCClient returns a client over any connection, with the rules of [DialTTRPC].
func NewTTRPCClient(conn net.Conn, opts ...ttrpc.ClientOpts) *ttrpc.Client {
	opts = append(opts, ttrpc.WithUnaryClientInterceptor(requireDeadline))
	return ttrpc.NewClient(boundedConn{conn}, opts...)
}

func requireDeadline(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	if _, ok := ctx.Deadline(); !ok {
		return fmt.Errorf("ttrpc call %s.%s without a deadline: %w", req.Service, req.Method, errdefs.ErrInternal)
	}
	return invoke(ctx, req, resp)
}

func unaryTTRPC(log *slog.Logger) ttrpc.UnaryServerInterceptor {
	return func(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		ctx, cancel := withDefaultDeadline(ctx)
		defer cancel()
		start := time.Now()
		var req any
		resp, err := method(WithLogger(ctx, log), func(v any) error {
			req = v
			if err := unmarshal(v); err != nil {
				return fmt.Errorf("request: %w: %w", err, errdefs.ErrInvalidArgument)
			}
			return nil
		})
		logCall(ctx, log, info.FullMethod, req, start, err)
		observe(ctx, info.FullMethod, err, start)
		return resp, toWire(err)
	}
}

// withoutTTRPCLog keeps ttrpc from logging what it also returns, and every connection that is closed as an error.
func withoutTTRPCLog(ctx context.Context) context.Context {
	silent := logrus.New()
	silent.SetOutput(io.Discard)
	return containerdlog.WithLogger(ctx, logrus.NewEntry(silent))
}

// boundedConn gives every write a time limit.
type boundedConn struct{ net.Conn }

func (c boundedConn) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

// onceListener hands out one connection and then blocks until that is closed.
type onceListener struct {
	conn  *watchedConn
	given bool
}

func (l *onceListener) Accept() (net.Conn, error) {
	if !l.given {
		l.given = true
		return l.conn, nil
	}
	<-l.conn.closed
	return nil, net.ErrClosed
}
func (l *onceListener) Close() error   { return l.conn.Close() }
func (l *onceListener) Addr() net.Addr { return l.conn.LocalAddr() }

// watchedConn says when it was closed.
type watchedConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
	err    error
}

func (c *watchedConn) Close() error {
	c.once.Do(func() {
		c.err = c.Conn.Close()
		close(c.closed)
	})
	return c.err
}

func (c *watchedConn) Write(b []byte) (int, error) { return boundedConn{c.Conn}.Write(b) }
