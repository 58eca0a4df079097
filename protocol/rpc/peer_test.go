package rpc_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/test/priv"
)

const strangerEnv = "CRUST_TEST_STRANGER"

// TestStranger is no test but the process of another user, who has found a way to the sockets in a directory.
func TestStranger(t *testing.T) {
	dir := os.Getenv(strangerEnv)
	if dir == "" {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	conn, err := rpc.Dial(filepath.Join(dir, "grpc"))
	if err == nil {
		_, err = guestv1.NewAgentClient(conn).GetInfo(ctx, &guestv1.GetInfoRequest{})
	}
	fmt.Printf("grpc: %t %v\n", err != nil, err)
	client, err := rpc.DialTTRPC(ctx, filepath.Join(dir, "ttrpc"))
	if err == nil {
		_, err = guestv1.NewTTRPCAgentClient(client).GetInfo(ctx, &guestv1.GetInfoRequest{})
	}
	fmt.Printf("ttrpc: %t %v\n", err != nil, err)
}

// TestStrangersAreTurnedAway opens the sockets to everybody; the kernel still tells who is there.
func TestStrangersAreTurnedAway(t *testing.T) {
	priv.Root(t)
	dir, err := os.MkdirTemp("", "rpc-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	var called atomic.Int32
	a := &agent{answer: func(context.Context) error { called.Add(1); return nil }}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	t.Cleanup(func() { cancel(); <-done; <-done })
	listen := func(name string) net.Listener {
		l, err := rpc.Listen(ctx, filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(dir, name), 0o666); err != nil {
			t.Fatal(err)
		}
		return l
	}
	server := rpc.NewServer(ctx, quiet())
	guestv1.RegisterAgentServer(server, grpcAgent{a: a})
	grpcListener, ttrpcListener := listen("grpc"), listen("ttrpc")
	go func() { done <- rpc.ServeGRPC(ctx, server, grpcListener, time.Second) }()
	go func() {
		done <- rpc.ServeTTRPC(ctx, ttrpcListener, quiet(), func(_ context.Context, _ rpc.Peer, s *ttrpc.Server) {
			guestv1.RegisterTTRPCAgentService(s, a)
		})
	}()
	// The test's own program lies where nobody else may look.
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "stranger"), program, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(uid uint32) string {
		cmd := exec.Command(filepath.Join(dir, "stranger"), "-test.run=^TestStranger$")
		cmd.Env = append(os.Environ(), strangerEnv+"="+dir)
		cmd.Dir = dir
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("uid %d: %v: %s", uid, err, out)
		}
		return string(out)
	}
	const nobody = 65534
	out := run(nobody)
	if n := called.Load(); n != 0 || !strings.Contains(out, "grpc: true") || !strings.Contains(out, "ttrpc: true") {
		t.Errorf("a stranger was answered %d times: %s", n, out)
	}
	out = run(0)
	if n := called.Load(); n != 2 || !strings.Contains(out, "grpc: false") || !strings.Contains(out, "ttrpc: false") {
		t.Errorf("root was answered %d times: %s", n, out)
	}
}
