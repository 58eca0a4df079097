package cluster

import (
	"fmt"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"crust.dev/crust/protocol/rpc"
)

// BenchmarkPod is the time from the kubelet's first call for a pod to a running container, by containerd's CRI plugin: the
// same container in a microVM with a deferred volume, which is formatted already, in one without, and as a process of the
// host. The end of the pod is not in it.
func BenchmarkPod(b *testing.B) {
	e := startEngine(b)
	v := e.node.Volume("data", "ext4")
	must(b, v.Create(step(b), 256<<20))
	must(b, v.Stage(step(b)))
	must(b, v.Publish(step(b), "pod-1"))
	conn, err := rpc.Dial(e.path("containerd.sock"))
	must(b, err)
	b.Cleanup(func() { _ = conn.Close() })
	data := &cri.Mount{HostPath: v.Target(), ContainerPath: "/data"}
	for _, tc := range []struct {
		name, runtime string
		mounts        []*cri.Mount
	}{
		{"microVM with a deferred volume", "crust", []*cri.Mount{data}},
		{"microVM without a volume", "crust", nil},
		{"runc without a volume", "runc", nil},
	} {
		b.Run(tc.name, func(b *testing.B) {
			n := 0
			for b.Loop() {
				n++
				p := newPod(b, e, conn, fmt.Sprintf("%s-%d-%d", tc.runtime, len(tc.mounts), n), tc.runtime)
				p.start(b, "main", "sleep 3600", tc.mounts...)
				b.StopTimer()
				p.end(b)
				b.StartTimer()
			}
		})
	}
}
