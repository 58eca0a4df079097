package crust_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/sptest"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/runtimehandler"
)

// TestLoad publishes, measures and removes 1,000 volumes from 64 clients, all of which repeat a call until it succeeds as a
// kubelet does, and kills the daemon twice. Nothing is lost, and nothing is left.
func TestLoad(t *testing.T) {
	const volumes, clients = 1000, 64
	n := newNode(t, func(c *crust.Config) { c.Log = slog.New(slog.DiscardHandler) })
	ctx, end := n.startChild(-1)
	defer func() { end() }()
	work := make(chan int)
	var wg sync.WaitGroup
	var mu sync.Mutex
	done := 0
	passed := make(chan struct{}, 2) // one for every kill
	for range clients {
		wg.Go(func() {
			for i := range work {
				n.live(t, i)
				mu.Lock()
				done++
				if done == volumes/3 || done == 2*volumes/3 {
					passed <- struct{}{}
				}
				mu.Unlock()
			}
		})
	}
	go func() {
		defer close(work)
		for i := range volumes {
			work <- i
		}
	}()
	for range 2 {
		<-passed
		n.stop() // SIGKILL
		<-ctx.Done()
		ctx, end = n.startChild(-1)
	}
	wg.Wait()
	end()
	end = func() string { return "" }
	w := n.world(nil)
	if len(w.Records)+len(w.Published)+len(w.Seals)+len(w.Files) > 0 {
		t.Errorf("left over: %+v", w)
	}
	n.start()
}

// live is the life of one volume: published, measured before any sandbox, unpublished.
func (n *node) live(t *testing.T, i int) {
	name := fmt.Sprintf("v%d", i)
	n.driver.Volume(t, name, 16<<20)
	target := n.target(name)
	req := publishRequest(name, target)
	if i%2 == 1 {
		req.VolumeContext[deferred.ParameterHandler] = "cli"
	}
	try := func(what string, call func(ctx context.Context) error) {
		deadline := time.Now().Add(2 * time.Minute)
		for {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			err := call(ctx)
			cancel()
			if err == nil {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("%s: %s: %v", name, what, err)
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	try("publish", func(ctx context.Context) error {
		_, err := n.csi().NodePublishVolume(ctx, req)
		return err
	})
	if !sealed(target) {
		t.Errorf("%s is not sealed", target)
	}
	try("measure", func(ctx context.Context) error {
		resp, err := n.csi().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
			VolumeId: name, VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20},
		})
		if err == nil && resp.GetCapacityBytes() != 32<<20 {
			err = fmt.Errorf("it has %d bytes", resp.GetCapacityBytes())
		}
		return err
	})
	try("unpublish", func(ctx context.Context) error { return n.unpublishWithin(ctx, name, target) })
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there (%v)", target, err)
	}
}

// BenchmarkRecords is the daemon with 10,000 deferrals on record: how long until it serves, what memory it takes, and how
// long stats take.
func BenchmarkRecords(b *testing.B) {
	const records = 10_000
	n := newNode(b, quiet)
	n.driver.Volume(b, "v0", 16<<20)
	n.stop()
	n.record(b, records)
	b.Run("start after a reboot", func(b *testing.B) { // every seal is made anew, while the daemon serves already
		for b.Loop() {
			began := time.Now()
			n.start()
			b.StopTimer()
			n.allSealed(b, records)
			b.ReportMetric(time.Since(began).Seconds(), "s-until-sealed")
			n.stop()
			n.unmount()
			b.StartTimer()
		}
	})
	n.start()
	n.allSealed(b, records)
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			n.restart()
		}
	})
	b.Run("stats", func(b *testing.B) {
		target := n.target("v0")
		s := n.sandbox("s", nil)
		if _, err := s.mount(b.Context(), target); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if _, err := n.csi().NodeGetVolumeStats(b.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v0", VolumePath: target}); err != nil {
				b.Fatal(err)
			}
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		b.ReportMetric(float64(m.HeapInuse)/(1<<20), "MiB-heap")
		if err := s.client.Released(b.Context(), target); err != nil {
			b.Fatal(err)
		}
	})
}

// record puts published deferrals into the journal of a stopped daemon.
func (n *node) record(b *testing.B, count int) {
	b.Helper()
	j, err := journal.Open(n.path("state", "journal.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 64 {
		wg.Go(func() {
			for i := range next {
				name := fmt.Sprintf("v%d", i)
				target := n.target(name)
				if err := os.Mkdir(target, 0o750); err != nil {
					b.Error(err)
				}
				d := runtimehandler.Deferral{
					Driver: sptest.Name, VolumeID: name, TargetPath: target, Device: filepath.Join(n.driver.Dir, name+".img"), SizeBytes: 16 << 20,
					FSType: "ext4", Serial: name,
				}
				rec := journal.Record{State: journal.Published, Handler: n.config.DefaultHandler, Created: time.Now(), ResolvedTarget: target, Deferral: d}
				if err := j.Put(nil, rec); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	wg.Wait()
}

func (n *node) allSealed(b *testing.B, count int) {
	b.Helper()
	for deadline := time.Now().Add(10 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(n.dir))
		if err == nil && len(mounts) == count {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%d of %d are sealed: %v", len(mounts), count, err)
		}
	}
}
