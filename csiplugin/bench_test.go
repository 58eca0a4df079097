package csiplugin_test

import (
	"testing"
)

func BenchmarkCreateDelete(b *testing.B) {
	h := newHost(b, "xfs")
	for b.Loop() {
		must(b, h.create("v", mounted("ext4"), nil).delete())
	}
}

func BenchmarkPublishDeferred(b *testing.B) {
	h := newHost(b, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	must(b, v.stage())
	for b.Loop() {
		_, err := v.deferTo("t", false)
		must(b, err, v.undefer("t", false))
	}
}

func BenchmarkPublishDeferredAgain(b *testing.B) {
	h := newHost(b, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	must(b, v.stage())
	for b.Loop() {
		_, err := v.deferTo("t", false)
		must(b, err)
	}
	must(b, v.undefer("t", false))
}

func BenchmarkPublishHost(b *testing.B) {
	for _, fstype := range []string{"ext4", "xfs"} {
		b.Run(fstype, func(b *testing.B) {
			h := newHost(b, "xfs")
			v := h.create("v", mounted(fstype), nil)
			must(b, v.stage(), v.publish("t"), v.unpublish("t"))
			for b.Loop() {
				must(b, v.publish("t"), v.unpublish("t"))
			}
		})
	}
}

func BenchmarkFormatAndPublishHost(b *testing.B) {
	h := newHost(b, "xfs")
	for b.Loop() {
		v := h.create("v", mounted("ext4"), nil)
		must(b, v.stage(), v.publish("t"), v.unpublish("t"), v.unstage(), v.delete())
	}
}

func BenchmarkStats(b *testing.B) {
	h := newHost(b, "xfs")
	v := h.create("v", mounted("ext4"), nil)
	must(b, v.stage(), v.publish("t"))
	for b.Loop() {
		_, err := v.stats(h.path("t"))
		must(b, err)
	}
	must(b, v.unpublish("t"))
}
