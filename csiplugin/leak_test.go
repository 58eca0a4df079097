package csiplugin_test

import (
	"os"
	"runtime"
	"testing"
	"time"
)

// TestAPluginThatEndsLeavesNothingInItsProcess runs it several times, with some work.
func TestAPluginThatEndsLeavesNothingInItsProcess(t *testing.T) {
	h := newHost(t, "ext4") // with an image
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	h.stop()
	count := func() (fds, goroutines int) {
		entries, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(entries), runtime.NumGoroutine()
	}
	fds, goroutines := count()
	for range 3 {
		h.start()
		must(t, v.publish("t"), v.unpublish("t"))
		h.stop()
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		f, g := count()
		if f <= fds && g <= goroutines {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("there are %d descriptors and %d goroutines, there were %d and %d", f, g, fds, goroutines)
		}
	}
}
