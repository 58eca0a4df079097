package qemu

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// socketPair returns both ends of a stream: ours, and one for a child.
func socketPair(name string) (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair for %s: %w", name, err)
	}
	theirs := os.NewFile(uintptr(fds[1]), name)
	file := os.NewFile(uintptr(fds[0]), name)
	defer file.Close() // FileConn makes a copy
	conn, err := net.FileConn(file)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, fmt.Errorf("socket pair for %s: %w", name, err)
	}
	return conn.(*net.UnixConn), theirs, nil
}
