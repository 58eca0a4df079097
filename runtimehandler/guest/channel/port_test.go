package channel_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/channel"
)

// addPort makes something that looks like a port with a host: a pipe whose both ends the opener has.
func addPort(t *testing.T, sys, dev, device, name string) {
	t.Helper()
	dir := filepath.Join(sys, "class", "virtio-ports", device)
	if err := errors.Join(
		os.MkdirAll(dir, 0o755),
		unix.Mkfifo(filepath.Join(dev, device), 0o600),
		os.WriteFile(filepath.Join(dir, "name"), []byte(name+"\n"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
}

func TestAcceptWaitsForThePort(t *testing.T) {
	sys, dev := t.TempDir(), t.TempDir()
	addPort(t, sys, dev, "vport0p1", "another")
	go func() {
		time.Sleep(20 * time.Millisecond) // it appears while somebody waits
		addPort(t, sys, dev, "vport0p2", "mine")
	}()
	conn, err := channel.Port{Name: "mine", Sys: sys, Dev: dev}.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	if n, err := conn.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if got := conn.LocalAddr().String(); got != "mine" {
		t.Errorf("address %q", got)
	}
	// A host that does not read holds a write up only as long as it was given.
	if err := conn.SetWriteDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a write that nobody takes: %v", err)
	}
}

func TestAcceptEnds(t *testing.T) {
	sys, dev := t.TempDir(), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := (channel.Port{Name: "none", Sys: sys, Dev: dev}).Accept(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
	})
}
