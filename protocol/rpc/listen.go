package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

// maxSocketPath is the longest path of a unix socket (sun_path of unix(7), less the final zero byte).
const maxSocketPath = 107

// ParseEndpoint returns the absolute socket path of an endpoint "unix:///path", "unix:/path" or "/path".
func ParseEndpoint(endpoint string) (string, error) {
	path := endpoint
	if rest, ok := strings.CutPrefix(endpoint, "unix:"); ok {
		path = rest
		if strings.HasPrefix(rest, "//") {
			path = rest[2:]
		}
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return "", fmt.Errorf("endpoint %q: want unix:///absolute/path: %w", endpoint, errdefs.ErrInvalidArgument)
	}
	if len(path) > maxSocketPath {
		return "", fmt.Errorf("endpoint %q: the path has %d bytes, a unix socket takes %d at most; choose a shorter directory: %w",
			endpoint, len(path), maxSocketPath, errdefs.ErrInvalidArgument)
	}
	return path, nil
}

// Listen opens a unix socket of mode 0600. A socket that a dead process has left is replaced; one that a living process
// answers on is ErrAlreadyExists, and anything that is not a socket is left alone. Closing the listener removes the
// socket.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	if err := removeStaleSocket(path); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	// Linux gives the socket's file the mode that the unbound socket has, so it never exists with a wider one.
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var chmodErr error
		if err := raw.Control(func(fd uintptr) { chmodErr = syscall.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return chmodErr
	}}
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

func removeStaleSocket(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket; remove it or choose another path: %w", path, errdefs.ErrAlreadyExists)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = conn.Close()
		return fmt.Errorf("another process is listening; stop it or choose another path: %w", errdefs.ErrAlreadyExists)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("socket of another process: %w", err)
	}
	return os.Remove(path)
}
