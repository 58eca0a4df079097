package e2e

import (
	"testing"

	"crust.dev/crust/test/node"
)

// BenchmarkSandbox is from the start of a sandbox until its volume is mounted inside: boot, resolve, attach, mount, report. A
// sandbox without volumes is what its start costs.
func BenchmarkSandbox(b *testing.B) {
	for _, volumes := range []string{"none", "ext4", "xfs"} {
		b.Run(volumes, func(b *testing.B) {
			n := start(b)
			var mounts []node.Mount
			if volumes != "none" {
				v := published(b, n, "v", volumes, 512*mib)
				mounts = []node.Mount{{Source: v.Target(), Destination: "/data"}}
				must(b, sandbox(b, n, "first", mounts...).Stop(ctx(b))) // which makes the filesystem
			}
			for b.Loop() {
				s := sandbox(b, n, "bench", mounts...)
				b.StopTimer()
				must(b, s.Stop(ctx(b)))
				b.StartTimer()
			}
		})
	}
}
