package channel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
)

// vsockPoll is how often it is looked whether the guest has a vsock device by now.
const vsockPoll = 10 * time.Millisecond

// ListenVsock waits until the guest has vsock, and listens on a port of it.
func ListenVsock(ctx context.Context, port uint32) (net.Listener, error) {
	tick := time.NewTicker(vsockPoll)
	defer tick.Stop()
	for {
		_, err := os.Stat("/dev/vsock")
		if err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the guest has no vsock: %w: %w", err, context.Cause(ctx))
		case <-tick.C:
		}
	}
	l, err := vsock.ListenContextID(unix.VMADDR_CID_ANY, port, nil)
	if err != nil {
		return nil, fmt.Errorf("listen on vsock port %d: %w", port, err)
	}
	return l, nil
}

// CheckPeer refuses a connection that is not from the wanted context id: vsock knows no network namespaces, so that
// everything in the guest can connect to the agent, and must not get far. ErrPermissionDenied.
func CheckPeer(conn net.Conn, want uint32) error {
	addr, ok := conn.RemoteAddr().(*vsock.Addr)
	if !ok {
		return fmt.Errorf("peer %v: %w", conn.RemoteAddr(), errdefs.ErrPermissionDenied)
	}
	if addr.ContextID != want {
		return fmt.Errorf("peer with context id %d, only %d may connect: %w", addr.ContextID, want, errdefs.ErrPermissionDenied)
	}
	return nil
}

// HostCID is the context id of the host (vsock(7)).
const HostCID = vsock.Host

// DialVsock connects to a vsock port; for tests within a guest.
func DialVsock(ctx context.Context, cid, port uint32) (net.Conn, error) {
	conn, err := vsock.DialContext(ctx, cid, port, nil)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("dial vsock %d:%d: %w", cid, port, err), errdefs.ErrUnavailable)
	}
	return conn, nil
}
