package rpc

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
)

// Peer is the process at the other end of a unix socket, as the kernel noted it when it connected (SO_PEERCRED,
// unix(7)). PID is that of the process that called connect; it may have passed the socket on or died since.
type Peer struct {
	PID int
	UID uint32
	GID uint32
}

// peerOf asks the kernel who is at the other end. ErrPermissionDenied unless it is root or our own user.
func peerOf(conn net.Conn) (Peer, error) {
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return Peer{}, fmt.Errorf("peer of a %T: %w", conn, errdefs.ErrPermissionDenied)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	if sockErr != nil {
		return Peer{}, fmt.Errorf("peer credentials: %w", sockErr)
	}
	peer := Peer{PID: int(cred.Pid), UID: cred.Uid, GID: cred.Gid}
	if peer.UID != 0 && int(peer.UID) != os.Geteuid() {
		return Peer{}, fmt.Errorf("peer with uid %d (pid %d): only root may use this socket: %w", peer.UID, peer.PID, errdefs.ErrPermissionDenied)
	}
	return peer, nil
}

// peerCredentials are gRPC transport credentials that admit root and our own user and put the [Peer] into AuthInfo.
type peerCredentials struct{}

// AuthType is the first half of credentials.AuthInfo.
func (Peer) AuthType() string { return "so_peercred" }

func (peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	peer, err := peerOf(conn)
	if err != nil {
		return nil, nil, err
	}
	return conn, peer, nil
}

func (peerCredentials) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	peer, err := peerOf(conn)
	if err != nil {
		return nil, nil, err
	}
	return conn, peer, nil
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "so_peercred"}
}
func (c peerCredentials) Clone() credentials.TransportCredentials { return c }
func (peerCredentials) OverrideServerName(string) error           { return nil }
