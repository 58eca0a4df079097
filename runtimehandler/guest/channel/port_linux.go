package channel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// pollInterval is how often a port that has not appeared is looked for.
const pollInterval = 10 * time.Millisecond

// Port is a virtio-serial port (virtio 1.2, section 5.3).
type Port struct {
	Name string // the port's name, as the host gave it
	Sys  string // where sysfs is; empty is /sys
	Dev  string // where devtmpfs is; empty is /dev
}

// Accept waits for the port, opens it, and returns a connection when the host is there. Closing the connection closes
// the port: what the host sent and nobody read is then gone, and the host may know (VIRTIO_CONSOLE_PORT_OPEN) that it can
// begin anew. There can be one connection at a time.
func (p Port) Accept(ctx context.Context) (net.Conn, error) {
	device, err := p.find(ctx)
	if err != nil {
		return nil, fmt.Errorf("port %s: %w", p.Name, err)
	}
	file, err := os.OpenFile(device, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("port %s: %w", p.Name, err)
	}
	conn := &portConn{File: file, name: p.Name}
	if err := conn.awaitHost(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("port %s: wait for the host: %w", p.Name, err), file.Close())
	}
	return conn, nil
}

// find waits until there is a port of the name.
func (p Port) find(ctx context.Context) (string, error) {
	sys, dev := orDefault(p.Sys, "/sys"), orDefault(p.Dev, "/dev")
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		files, err := filepath.Glob(filepath.Join(sys, "class", "virtio-ports", "*", "name"))
		if err != nil {
			return "", err
		}
		for _, file := range files {
			name, err := os.ReadFile(file)
			if err != nil || strings.TrimSpace(string(name)) != p.Name {
				continue
			}
			device := filepath.Join(dev, filepath.Base(filepath.Dir(file)))
			if _, err := os.Stat(device); err == nil {
				return device, nil
			}
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("it has not appeared: %w: %w", context.Cause(ctx), errdefs.ErrNotFound)
		case <-tick.C:
		}
	}
}

// portConn is an open port. Read returns io.EOF when the host has gone.
type portConn struct {
	*os.File
	name string
}

// awaitHost returns when the host has connected. Until then a read returns nothing and a write would block, so that a
// wait for the port to be writable is a wait for the host.
func (c *portConn) awaitHost(ctx context.Context) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var pollErr error
	err = raw.Write(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}
		if _, pollErr = unix.Poll(fds, 0); pollErr != nil && !errors.Is(pollErr, unix.EINTR) {
			return true
		}
		pollErr = nil
		return fds[0].Revents&unix.POLLHUP == 0
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, pollErr)
}

func (c *portConn) LocalAddr() net.Addr  { return portAddr(c.name) }
func (c *portConn) RemoteAddr() net.Addr { return portAddr(c.name) }

// portAddr is the name of a port.
type portAddr string

func (portAddr) Network() string  { return "virtio-serial" }
func (a portAddr) String() string { return string(a) }

func orDefault(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
