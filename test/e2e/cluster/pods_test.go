package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// TestKubernetes is what users do, with the objects that they write, on an unmodified Kubernetes. Driver, daemon and sidecars are
// processes here, which the test can kill; the sidecars call the node's driver without a router. What is the same with one is
// played by TestDeployed only.
func TestKubernetes(t *testing.T) {
	startKube(t, Start).play(t, []scenario{
		{"first-pod", firstPod}, {"expansion", expansion}, {"fs-group", fsGroup}, {"sub-path", subPath}, {"containers", containers},
		{"two-pods", twoPods}, {"wrong-runtime", wrongRuntime}, {"raw-block", rawBlock}, {"snapshots", snapshots},
		{"restarts", restarts}, {"copies", copies}, {"killed-machine", aKilledMachine}, {"reboot", reboot},
	})
}

// firstPod: the filesystem is in the guest and not on the host, and the kubelet's metrics show what the guest measures.
func firstPod(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	if mount := s.sh("app", "grep ' /data ' /proc/mounts"); !strings.HasPrefix(mount, "/dev/vd") || !strings.Contains(mount, " ext4 ") {
		s.t.Errorf("in the guest: %q", mount)
	}
	if types := s.hostMounts("data"); !slices.Equal(types, []string{"bpf"}) {
		s.t.Errorf("on the host, where only the seal should be: %v", types)
	}
	if token := s.sh("app", "cat /var/run/secrets/kubernetes.io/serviceaccount/namespace"); token != s.name {
		s.t.Errorf("the service account's namespace is %q", token)
	}
	s.sh("app", "dd if=/dev/urandom of=/data/big bs=1M count=64 2>/dev/null; sync")
	blocks := strings.Fields(s.sh("app", "df -k /data | tail -1"))
	capacity, err := strconv.ParseUint(blocks[1], 10, 64)
	must(s.t, err)
	used, err := strconv.ParseUint(blocks[2], 10, 64)
	must(s.t, err)
	eventually(s.t, "the kubelet's summary", func(ctx context.Context) error {
		raw, err := s.kubeletSays(ctx, "/stats/summary")
		if err != nil {
			return err
		}
		var summary struct {
			Pods []struct {
				PodRef struct{ Namespace string }
				Volume []struct {
					Name                     string
					CapacityBytes, UsedBytes uint64
				}
			}
		}
		if err := json.Unmarshal(raw, &summary); err != nil {
			return err
		}
		for _, p := range summary.Pods {
			for _, v := range p.Volume {
				if p.PodRef.Namespace == s.name && v.Name == "data" {
					if v.CapacityBytes == capacity<<10 && v.UsedBytes >= used<<10 && v.UsedBytes < used<<10+1<<20 {
						return nil
					}
					return fmt.Errorf("%+v, and the guest says %d KiB of %d KiB", v, used, capacity)
				}
			}
		}
		return fmt.Errorf("volume data is not in it")
	})
}

// expansion grows a filesystem while its pod writes to it.
func expansion(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data", func(p *corev1.Pod) {
		p.Spec.Containers[0].Command[2] = "trap exit TERM; i=0; while :; do i=$((i+1)); echo $i >> /data/log; sleep 0.1; done"
	})
	s.running("app")
	size := func() int {
		kib, err := strconv.Atoi(strings.Fields(s.sh("app", "df -k /data | tail -1"))[1])
		must(s.t, err)
		return kib
	}
	before := size()
	s.kubectl("patch", "pvc", "data", "--patch", `{"spec":{"resources":{"requests":{"storage":"512Mi"}}}}`)
	s.kubectl("wait", "pvc/data", "--for=jsonpath={.status.capacity.storage}=512Mi", "--timeout=4m")
	if after := size(); after < before+200<<10 {
		s.t.Errorf("the guest had %d KiB and has %d", before, after)
	}
	if pod := s.running("app"); pod.Status.ContainerStatuses[0].RestartCount != 0 {
		s.t.Error("the pod was restarted")
	}
	if gaps := s.sh("app", "awk '$1 != NR' /data/log | wc -l"); gaps != "0" {
		s.t.Errorf("%s lines of the writer's are missing or wrong", gaps)
	}
}

// fsGroup: a user without rights writes, and what it writes belongs to the group.
func fsGroup(s *space) {
	s.claim("data", "256Mi")
	user, group := int64(1000), int64(2000)
	s.pod("app", microVM, "data", func(p *corev1.Pod) {
		p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &user, RunAsGroup: &user, FSGroup: &group}
	})
	s.running("app")
	if got := s.sh("app", "echo x > /data/f && stat -c %u:%g /data/f; stat -c %g:%a /data"); got != "1000:2000\n2000:2775" {
		s.t.Errorf("%q", got)
	}
}

// subPath: containers see their parts of one volume.
func subPath(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data", func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, container("a", idle), container("b", idle))
		p.Spec.Containers[1].VolumeMounts[0].SubPath = "one"
		p.Spec.Containers[2].VolumeMounts[0].SubPath = "two/deep"
	})
	s.running("app")
	s.sh("app", "echo a > /data/f", "a")
	s.sh("app", "echo b > /data/f", "b")
	if got := s.sh("app", "cat /data/one/f /data/two/deep/f", "main"); got != "a\nb" {
		s.t.Errorf("the whole volume has %q", got)
	}
	s.gone("app")
}

// containers: an init container and two others share a volume, and one of them ends and is started again.
func containers(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data", func(p *corev1.Pod) {
		p.Spec.InitContainers = []corev1.Container{container("init", "echo first > /data/order")}
		p.Spec.Containers = []corev1.Container{
			container("one", "echo one >> /data/order; "+idle),
			container("two", "echo x >> /data/starts; [ $(wc -l < /data/starts) -gt 1 ] || exit 3; "+idle),
		}
	})
	eventually(s.t, "the container is started again", func(context.Context) error {
		for _, c := range s.running("app").Status.ContainerStatuses {
			if c.Name == "two" && c.RestartCount == 1 {
				return nil
			}
		}
		return fmt.Errorf("it was not")
	})
	if got := s.sh("app", "cat /data/order; wc -l < /data/starts", "two"); got != "first\none\n2" {
		s.t.Errorf("%q", got)
	}
}

// takingTurns: the same volume in one microVM after the other, then mounted on the host for runc, and back.
func takingTurns(s *space) {
	s.claim("data", "256Mi")
	want := ""
	for i, class := range []string{microVM, microVM, onHost, microVM} {
		name := fmt.Sprintf("app-%d", i)
		s.pod(name, class, "data")
		s.running(name)
		if got := s.sh(name, "cat /data/log 2>/dev/null; true"); got != strings.TrimSpace(want) {
			s.t.Errorf("%s finds %q, want %q", name, got, want)
		}
		if mount := s.sh(name, "grep ' /data ' /proc/mounts"); strings.HasPrefix(mount, "/dev/vd") != (class == microVM) {
			s.t.Errorf("%s has %q", name, mount)
		}
		s.sh(name, "echo "+name+" >> /data/log; sync")
		want += name + "\n"
		s.gone(name)
	}
	if types := s.hostMounts("data"); len(types) > 0 {
		s.t.Errorf("left mounted: %v", types)
	}
}

// twoPods: while a microVM has a volume, the host does not get it, and the other way round.
func twoPods(s *space) {
	s.claim("data", "256Mi")
	s.pod("first", microVM, "data")
	s.running("first")
	s.pod("second", onHost, "data")
	s.says("second", "one user only", s.volume("data").Spec.CSI.VolumeHandle)
	s.sh("first", "echo mine > /data/f; sync")
	s.gone("first")
	s.running("second") // its turn has come
	if got := s.sh("second", "cat /data/f"); got != "mine" {
		s.t.Errorf("%q", got)
	}
	s.pod("third", microVM, "data")
	s.says("third", "one user only")
	s.gone("second")
	s.running("third")
}

// wrongRuntime: a pod demands a deferral that its runtime cannot honour, and is told what to do.
func wrongRuntime(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", onHost, "data", func(p *corev1.Pod) { p.Annotations = map[string]string{"crust.dev/defer": "data"} })
	s.says("app", "runtimeClassName", s.volume("data").Spec.CSI.VolumeHandle)
	s.gone("app")
	s.pod("corrected", microVM, "data")
	s.running("corrected")
}

// rawBlock: volumes without a filesystem are none of CRuSt's business.
func rawBlock(s *space) {
	block := corev1.PersistentVolumeBlock
	s.claim("data", "64Mi", func(spec *corev1.PersistentVolumeClaimSpec) { spec.VolumeMode = &block })
	device := func(p *corev1.Pod) {
		c := &p.Spec.Containers[0]
		c.VolumeMounts, c.VolumeDevices = nil, []corev1.VolumeDevice{{Name: "data", DevicePath: "/dev/data"}}
	}
	s.pod("app", onHost, "data", device)
	s.running("app")
	s.sh("app", "echo raw | dd of=/dev/data bs=512 conv=sync,fsync 2>/dev/null")
	size := resource.MustParse("64Mi")
	if got := s.sh("app", "head -c 3 /dev/data; blockdev --getsize64 /dev/data"); got != fmt.Sprintf("raw%d", size.Value()) {
		s.t.Errorf("%q", got)
	}
	s.gone("app")
	s.pod("sandboxed", microVM, "data", device)
	s.says("sandboxed", "volumeMode: Filesystem")
	s.gone("sandboxed")
}
