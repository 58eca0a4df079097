package crust_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/crust"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

func quiet(c *crust.Config) { c.Log = slog.New(slog.NewTextHandler(io.Discard, nil)) }

// kubelet is the kubelet's side of one socket, which publishes and unpublishes volumes.
type kubelet struct {
	n    *node
	node csi.NodeClient
}

func newKubelet(b *testing.B, n *node, socket string) kubelet {
	b.Helper()
	conn, err := rpc.Dial(n.path(socket))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close() })
	return kubelet{n, csi.NewNodeClient(conn)}
}

func (k kubelet) publish(ctx context.Context, req *csi.NodePublishVolumeRequest) error {
	_, err := k.node.NodePublishVolume(ctx, req)
	return err
}

func (k kubelet) unpublish(ctx context.Context, req *csi.NodePublishVolumeRequest) error {
	_, err := k.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: req.GetVolumeId(), TargetPath: req.GetTargetPath()})
	return err
}

// request is for the i-th volume, which exists afterwards, in a pod of its own.
func (k kubelet) request(i int, deferredBy string) *csi.NodePublishVolumeRequest {
	name := fmt.Sprintf("v%d", i)
	k.n.driver.Volume(k.n.t, name, 64<<20)
	req := publishRequest(name, k.n.target(name))
	req.VolumeContext[deferred.ParameterDefer] = deferredBy
	return req
}

// BenchmarkPublish is NodePublishVolume by a driver that answers from memory: straight, through the daemon untouched, and
// deferred. The driver mounts nothing in any of them, so the difference is what the daemon costs.
func BenchmarkPublish(b *testing.B) {
	for _, way := range []struct{ name, socket, policy string }{
		{"straight to the driver", "sp.sock", "never"},
		{"through crustd, on the host", "csi.sock", "never"},
		{"through crustd, deferred", "csi.sock", "always"},
	} {
		b.Run(way.name, func(b *testing.B) {
			n := newNode(b, quiet)
			n.driver.OnHost = func(string, string) error { return nil }
			k := newKubelet(b, n, way.socket)
			req := k.request(0, way.policy)
			for b.Loop() {
				if err := k.publish(b.Context(), req); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := k.unpublish(b.Context(), req); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

// BenchmarkPublishParts says where the time of a deferred publish goes, in microseconds each.
func BenchmarkPublishParts(b *testing.B) {
	parts := map[string]time.Duration{}
	var mu sync.Mutex
	var last time.Time
	names := map[string]string{
		"publish: intended":                 "journal-µs/op",
		"publish: published by the storage": "driver-µs/op",
		"publish: sealed":                   "check+seal-µs/op",
		"publish: staged":                   "projection-µs/op",
		"publish: committed":                "journal-µs/op",
	}
	n := newNode(b, quiet)
	n.watch = func(place string) {
		mu.Lock()
		defer mu.Unlock()
		now := time.Now()
		if name := names[place]; name != "" {
			parts[name] += now.Sub(last)
		}
		last = now
	}
	n.restart()
	k := newKubelet(b, n, "csi.sock")
	req := k.request(0, "always")
	req.VolumeContext[deferred.ParameterHandler] = "cli" // the one that puts out a record
	for b.Loop() {
		mu.Lock()
		last = time.Now()
		mu.Unlock()
		if err := k.publish(b.Context(), req); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := k.unpublish(b.Context(), req); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	for name, took := range parts {
		b.ReportMetric(float64(took.Microseconds())/float64(b.N), name)
	}
}

// BenchmarkPublishConcurrently publishes and unpublishes from so many clients at once; the journal's commits are shared.
func BenchmarkPublishConcurrently(b *testing.B) {
	for _, clients := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			n := newNode(b, quiet)
			k := newKubelet(b, n, "csi.sock")
			requests := make(chan *csi.NodePublishVolumeRequest, clients)
			for i := range clients {
				requests <- k.request(i, "always")
			}
			var left atomic.Int64
			left.Store(int64(b.N))
			b.ResetTimer()
			var wg sync.WaitGroup
			for range clients {
				wg.Go(func() {
					req := <-requests
					for left.Add(-1) >= 0 {
						if err := k.publish(b.Context(), req); err != nil {
							b.Error(err)
							return
						}
						if err := k.unpublish(b.Context(), req); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
		})
	}
}

// withWatch is a context in which watch is told of every step of a change.
func withWatch(ctx context.Context, watch func(place string)) context.Context {
	if watch == nil {
		return ctx
	}
	return crashpoint.With(ctx, watch)
}
