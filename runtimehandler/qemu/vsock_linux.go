package qemu

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"time"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
)

// vhostVsock is the host's side of vsock.
const vhostVsock = "/dev/vhost-vsock"

// vhostSetGuestCID is VHOST_VSOCK_SET_GUEST_CID of the kernel's include/uapi/linux/vhost.h.
const vhostSetGuestCID = 0x4008af60

const (
	firstCID = 3       // 0 to 2 are taken (vsock(7))
	cidTries = 64      // of random ids; there are 2^32 of them
	dialWait = 50e6    // between two attempts to reach the agent, in nanoseconds
	cidSpan  = 1 << 31 // ids are chosen below this; some tools read them as signed
)

// openVsock opens the host's vsock and takes a context id that no other VM has. It returns nil if the host has no vsock.
func openVsock() (*os.File, uint32, error) {
	f, err := os.OpenFile(vhostVsock, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("vsock: %w", err)
	}
	cid, err := claimCID(func(cid uint32) error {
		wide := uint64(cid)
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), vhostSetGuestCID, uintptr(unsafe.Pointer(&wide))); errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, cid, nil
}

// claimCID sets random context ids until one is free. Whoever else looks for one does the same, and the kernel decides.
func claimCID(set func(uint32) error) (uint32, error) {
	for range cidTries {
		cid := firstCID + rand.Uint32N(cidSpan-firstCID)
		err := set(cid)
		if err == nil {
			return cid, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return 0, fmt.Errorf("vsock: set context id: %w", err)
		}
	}
	return 0, fmt.Errorf("vsock: no free context id in %d attempts: %w", cidTries, errdefs.ErrResourceExhausted)
}

// dialVsock connects to the agent, which may not listen yet.
func dialVsock(ctx context.Context, cid uint32) (net.Conn, error) {
	for {
		conn, err := vsock.DialContext(ctx, cid, AgentVsockPort, nil)
		if err == nil {
			return conn, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("vsock %d:%d: %w: %w", cid, AgentVsockPort, err, errdefs.ErrUnavailable)
		case <-time.After(dialWait):
		}
	}
}
