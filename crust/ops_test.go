package crust_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"crust.dev/crust/crust"
	"crust.dev/crust/protocol/rpc"
)

// freeAddress is a TCP address on which nobody listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, "listen", err)
	defer l.Close()
	return l.Addr().String()
}

func get(t *testing.T, address, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, nil)
	check(t, "request", err)
	resp, err := http.DefaultClient.Do(req)
	check(t, path, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	check(t, path, err)
	return resp.StatusCode, string(body)
}

func TestStatus(t *testing.T) {
	address := freeAddress(t)
	n := newNode(t, func(c *crust.Config) { c.HTTPAddress = address })
	health := func() healthv1.HealthCheckResponse_ServingStatus {
		resp, err := healthv1.NewHealthClient(n.conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
		check(t, "health", err)
		return resp.GetStatus()
	}
	t.Run("in order", func(t *testing.T) {
		for _, path := range []string{"/healthz", "/readyz"} {
			if code, body := get(t, address, path); code != http.StatusOK {
				t.Errorf("%s: %d %s", path, code, body)
			}
		}
		if s := health(); s != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("health %v", s)
		}
	})
	t.Run("metrics", func(t *testing.T) {
		target := n.publish("v1", "pod1")
		s := n.sandbox("s1", nil)
		_, err := s.mount(t.Context(), target)
		check(t, "mount", err)
		n.publish("v2", "pod2")
		_, _ = n.csi().NodePublishVolume(t.Context(), publishRequest("none", n.target("pod3")))
		_ = n.conn.Invoke(t.Context(), "/csi.v1.Node/NobodyHasThis", &csi.ProbeRequest{}, &csi.ProbeResponse{})
		_, body := get(t, address, "/metrics")
		for _, want := range []string{
			"volumes_published_with_deferred_ops_total 2",
			`crust_deferrals{handler="remote",state="mounted"} 1`,
			`crust_deferrals{handler="remote",state="published"} 1`,
			`crust_rpc_duration_seconds_count{code="OK",method="/csi.v1.Node/NodePublishVolume"} 2`,
			`crust_rpc_duration_seconds_count{code="NotFound",method="/csi.v1.Node/NodePublishVolume"} 1`,
			`crust_rpc_duration_seconds_count{code="Unimplemented",method="other"} 1`,
		} {
			if !strings.Contains(body, want+"\n") {
				t.Errorf("no line %s", want)
			}
		}
		if strings.Contains(body, "pod1") || strings.Contains(body, "v1,") || t.Failed() {
			t.Log(body)
		}
	})
	t.Run("profiling is not offered unasked", func(t *testing.T) {
		if code, _ := get(t, address, "/debug/pprof/"); code != http.StatusNotFound {
			t.Errorf("%d", code)
		}
	})
	t.Run("without the driver", func(t *testing.T) {
		n.stopDriver()
		if code, body := get(t, address, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "[-] driver") {
			t.Errorf("%d %s", code, body)
		}
		if code, _ := get(t, address, "/healthz"); code != http.StatusOK {
			t.Errorf("the process is healthy: %d", code)
		}
		if s := health(); s != healthv1.HealthCheckResponse_NOT_SERVING {
			t.Errorf("health %v", s)
		}
	})
}

// TestLogSafety sends secrets in every field that may have them, and names that would forge a line of the log. Neither is
// found in the log at its most talkative, in an error, or on the disk.
func TestLogSafety(t *testing.T) {
	n := newNode(t)
	n.driver.Volume(t, "v1", 64<<20)
	const forged = "x\ntime=2026-01-01T00:00:00Z level=ERROR msg=forged \x1b[31m"
	secrets := map[string]string{"password": "s3cret-value"}
	target := n.target("pod1")
	publish := publishRequest("v1", target)
	publish.Secrets = secrets
	publish.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"] = `{"":{"token":"s3cret-token"}}`
	capability := publish.GetVolumeCapability()
	bad := publishRequest(forged, n.target("pod2"))
	bad.Secrets, bad.VolumeContext["crust.dev/handler"] = secrets, forged
	var texts []string
	for name, call := range map[string]func(ctx context.Context) error{
		"stage": func(ctx context.Context) error {
			_, err := n.csi().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
				VolumeId: forged, StagingTargetPath: n.path("stage"), VolumeCapability: capability, Secrets: secrets, VolumeContext: publish.GetVolumeContext(),
			})
			return err
		},
		"publish":        func(ctx context.Context) error { _, err := n.csi().NodePublishVolume(ctx, publish); return err },
		"publish forged": func(ctx context.Context) error { _, err := n.csi().NodePublishVolume(ctx, bad); return err },
		"expand": func(ctx context.Context) error {
			_, err := n.csi().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: forged, VolumePath: target, Secrets: secrets, CapacityRange: &csi.CapacityRange{RequiredBytes: 1}})
			return err
		},
		"unpublish": func(ctx context.Context) error { return n.unpublishWithin(ctx, forged, n.path("x")) },
		"an unknown method": func(ctx context.Context) error {
			return n.conn.Invoke(ctx, "/csi.v1.Controller/CreateVolume", &csi.CreateVolumeRequest{Name: forged, Secrets: secrets}, &csi.CreateVolumeResponse{})
		},
	} {
		if err := call(t.Context()); err != nil {
			texts = append(texts, name+": "+err.Error())
		}
	}
	n.stop()
	state, err := os.ReadFile(n.path("state", "journal.db"))
	check(t, "journal", err)
	log := n.log.String()
	for what, text := range map[string]string{"log": log, "an error": strings.Join(texts, "\n"), "the journal": string(state)} {
		for _, secret := range []string{"s3cret-value", "s3cret-token"} {
			if strings.Contains(text, secret) {
				t.Errorf("%s has a secret", what)
			}
		}
	}
	for line := range strings.Lines(log) {
		if !strings.HasPrefix(line, "time=") || strings.HasPrefix(line, "time=2026-01-01T00") || strings.Contains(line, "\x1b") {
			t.Errorf("a line of the log was forged: %q", line)
		}
	}
	if !strings.Contains(log, "level=DEBUG") && !strings.Contains(log, "level=INFO") {
		t.Error("the log says nothing, so this test says nothing")
	}
	n.start()
}

// TestSocketsAreForRoot: the mode keeps everybody else away; what the peer check does beyond that is tested in rpc.
func TestSocketsAreForRoot(t *testing.T) {
	n := newNode(t)
	for _, socket := range []string{"csi.sock", "rt.sock", "kep.sock"} {
		info, err := os.Stat(n.path(socket))
		check(t, socket, err)
		if mode := info.Mode(); mode.Perm() != 0o600 || mode.Type() != os.ModeSocket {
			t.Errorf("%s has mode %v", socket, mode)
		}
	}
	conn, err := rpc.Dial(n.path("kep.sock"))
	check(t, "dial", err)
	defer conn.Close()
	if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Error(fmt.Errorf("root: %w", err))
	}
}
