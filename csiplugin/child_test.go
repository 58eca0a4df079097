package csiplugin_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// childVariable makes the test binary a plugin: its value is an order.
const childVariable = "CRUST_TEST_CSI_CHILD"

// order is what a child has to do: serve, and kill itself in the At-th place of a call of Method, or of the start if that
// is empty. A negative At is never.
type order struct {
	Endpoint, Pool, Method, Crustd string
	At                             int
}

func runChild() {
	var o order
	if err := json.Unmarshal([]byte(os.Getenv(childVariable)), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	p, err := csiplugin.New(csiplugin.Config{
		Endpoint: o.Endpoint, NodeID: "node-1", PoolDir: o.Pool, Crustd: o.Crustd, Mode: csiplugin.ModeAll,
		DriverName: csiplugin.DefaultDriverName, Version: "test", Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Images: fromHere,
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	p.Watch(func(ctx context.Context) context.Context {
		if method, _ := grpc.Method(ctx); method != o.Method {
			return ctx
		}
		return crashpoint.With(ctx, func(place string) {
			if o.At--; o.At == -1 {
				fmt.Println(place)
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		})
	})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := p.Run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// command is the test binary as a plugin.
func (h *host) command(o order) (child *exec.Cmd, places io.Reader) {
	h.t.Helper()
	o.Endpoint, o.Pool, o.Crustd = h.cfg.Endpoint, h.pool, h.cfg.Crustd
	text, err := json.Marshal(o)
	if err != nil {
		h.t.Fatal(err)
	}
	child = exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childVariable+"="+string(text))
	child.Stderr = h.log
	out, err := child.StdoutPipe()
	must(h.t, err, child.Start())
	return child, out
}

// startChild runs the plugin as a process of its own that is killed in the at-th place of a method.
func (h *host) startChild(method string, at int) (end func() (place string)) {
	h.t.Helper()
	child, places := h.command(order{Method: method, At: at})
	h.stop = func() { _ = child.Process.Kill() } // should the test fail before it has ended
	h.dial(make(chan error, 1))
	return func() (place string) {
		_ = h.conn.Close()
		_ = child.Process.Signal(syscall.SIGTERM)
		place = firstLine(places)
		_ = child.Wait()
		h.stop = func() {}
		return place
	}
}

// runChildStart runs the plugin as a process of its own that is killed in the at-th place of its start, or else when it
// serves.
func (h *host) runChildStart(at int) (place string) {
	h.t.Helper()
	child, places := h.command(order{At: at})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		place = firstLine(places)
		_ = child.Wait()
	}()
	for {
		select {
		case <-ended:
			return place
		case <-time.After(time.Millisecond):
		}
		if conn, err := net.Dial("unix", h.path("csi.sock")); err == nil {
			_ = conn.Close()
			_ = child.Process.Signal(syscall.SIGTERM)
		}
	}
}

func firstLine(r io.Reader) string {
	line := make([]byte, 128)
	n, _ := r.Read(line)
	return strings.TrimSpace(string(line[:n]))
}
