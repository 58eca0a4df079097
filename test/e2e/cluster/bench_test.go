package cluster

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	watchtools "k8s.io/client-go/tools/watch"
)

// BenchmarkPod is the time from the creation of a pod to the moment when the API server shows that it runs: in a microVM with a
// deferred volume, which is formatted already, in one without a volume, and the same as processes of the host, where the
// volume is mounted. The end of a pod is not in it.
func BenchmarkPod(b *testing.B) {
	k := startKube(b, Start)
	s := k.in(b, "pods")
	s.claim("data", "256Mi")
	s.pod("first", microVM, "data")
	s.running("first")
	s.gone("first")
	without := func(p *corev1.Pod) { p.Spec.Volumes, p.Spec.Containers[0].VolumeMounts = nil, nil }
	for _, tc := range []struct {
		name, class string
		change      []func(*corev1.Pod)
	}{
		{"microVM with a deferred volume", microVM, nil},
		{"microVM without a volume", microVM, []func(*corev1.Pod){without}},
		{"runc with a volume of the host", onHost, nil},
		{"runc without a volume", onHost, []func(*corev1.Pod){without}},
	} {
		b.Run(tc.name, func(b *testing.B) {
			s := &space{k, b, s.name}
			for n := 0; b.Loop(); n++ {
				b.StopTimer()
				name := fmt.Sprintf("app-%d", n)
				watcher, err := k.api.CoreV1().Pods(s.name).Watch(step(b), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
				must(b, err)
				b.StartTimer()
				s.pod(name, tc.class, "data", tc.change...)
				_, err = watchtools.UntilWithoutRetry(step(b), watcher, func(e watch.Event) (bool, error) {
					pod, ok := e.Object.(*corev1.Pod)
					return ok && pod.Status.Phase == corev1.PodRunning, nil
				})
				b.StopTimer()
				must(b, err)
				s.gone(name)
				b.StartTimer()
			}
		})
	}
}
