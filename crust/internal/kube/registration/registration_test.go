package registration_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"crust.dev/crust/crust/internal/kube/registration"
)

// kubelet asks as the kubelet's plugin watcher does when a socket appears.
func kubelet(t *testing.T, socket string, accept bool) {
	t.Helper()
	var conn *grpc.ClientConn
	waitFor(t, "the socket", func() error {
		if _, err := os.Lstat(socket); err != nil {
			return err
		}
		var err error
		conn, err = grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		return err
	})
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(t.Context(), &registerapi.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if info.GetType() != "CSIPlugin" || info.GetName() != "csi.example.com" || info.GetEndpoint() != "/plugins/csi.sock" || strings.Join(info.GetSupportedVersions(), ",") != "1.0.0" {
		t.Errorf("info %v", info)
	}
	status := &registerapi.RegistrationStatus{PluginRegistered: accept}
	if !accept {
		status.Error = "another driver with the same name"
	}
	if _, err := client.NotifyRegistrationStatus(t.Context(), status); err != nil {
		t.Fatal(err)
	}
}

func waitFor(t *testing.T, what string, fn func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestRegistration(t *testing.T) {
	top, err := os.MkdirTemp("", "reg-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(top)
	dir := filepath.Join(top, "plugins_registry")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "csi.example.com-reg.sock")
	var silent atomic.Bool
	silent.Store(true)
	answers := make(chan bool, 10)
	r, err := registration.New(registration.Config{
		Dir: dir, Endpoint: "/plugins/csi.sock", Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Name: func(context.Context) (string, error) {
			if silent.Load() {
				return "", errors.New("no driver yet")
			}
			return "csi.example.com", nil
		},
		Answered: func(accepted bool) { answers <- accepted },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()

	t.Run("not before the driver answers", func(t *testing.T) {
		waitFor(t, "the reason", func() error {
			if err := r.Ready(); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "no driver yet") {
				return err
			}
			return nil
		})
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
			t.Errorf("in the kubelet's directory: %v, %v", entries, err)
		}
		silent.Store(false)
	})
	t.Run("the kubelet accepts", func(t *testing.T) {
		kubelet(t, socket, true)
		if err := r.Ready(); err != nil || !<-answers {
			t.Errorf("ready: %v", err)
		}
		if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("socket: %v, %v", info.Mode(), err)
		}
	})
	t.Run("the kubelet's directory is made anew", func(t *testing.T) {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(dir, 0o750); err != nil {
			t.Fatal(err)
		}
		kubelet(t, socket, true)
		<-answers
	})
	t.Run("the kubelet refuses, and is asked again", func(t *testing.T) {
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		kubelet(t, socket, false)
		if <-answers {
			t.Error("a refusal counts as accepted")
		}
		if err := r.Ready(); err == nil || !strings.Contains(err.Error(), "another driver with the same name") {
			t.Errorf("ready: %v", err)
		}
		waitFor(t, "the socket to be taken away", func() error {
			if _, err := os.Lstat(socket); err == nil {
				return errors.New("it is still there")
			}
			return nil
		})
		kubelet(t, socket, true)
		if err := r.Ready(); err != nil {
			t.Errorf("ready: %v", err)
		}
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("left in the kubelet's directory: %v, %v", entries, err)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := registration.New(registration.Config{Dir: "x"}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("New: %v", err)
	}
}
