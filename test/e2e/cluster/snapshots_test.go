package cluster

import (
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"
)

// snapshot makes a snapshot of a claim by a class and waits until it is ready.
func (s *space) snapshot(name, claim, class string) {
	s.t.Helper()
	s.cut(name, claim, class)
	s.ready(name)
}

// cut asks for a snapshot.
func (s *space) cut(name, claim, class string) {
	s.t.Helper()
	s.apply(fmt.Sprintf(`apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: %s}
spec: {volumeSnapshotClassName: %s, source: {persistentVolumeClaimName: %s}}
`, name, class, claim))
}

func (s *space) ready(snapshot string) {
	s.t.Helper()
	s.kubectl("wait", "volumesnapshot/"+snapshot, "--for=jsonpath={.status.readyToUse}=true", "--timeout=4m")
}

// content is the VolumeSnapshotContent of a snapshot.
func (s *space) content(snapshot string) string {
	s.t.Helper()
	return s.kubectl("get", "volumesnapshot", snapshot, "-o", "jsonpath={.status.boundVolumeSnapshotContentName}")
}

// snapshots: a running pod's volume is cut, restored and cloned, larger too, and its copies stay what they were.
func snapshots(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "echo before > /data/f") // and no sync: the cut is made with the filesystem frozen
	s.snapshot("cut", "data", "crust-filesystem")
	s.sh("app", "echo after > /data/f; sync")
	s.claim("restored", "384Mi", from("VolumeSnapshot", "cut"))
	s.claim("cloned", "256Mi", from("PersistentVolumeClaim", "data"))
	s.pod("restored", microVM, "restored")
	s.running("restored")
	if got := s.sh("restored", "cat /data/f"); got != "before" {
		s.t.Errorf("the restored volume has %q", got)
	}
	if size := s.sh("restored", "df -k /data | tail -1 | awk '{print ($2 > 330000)}'"); size != "1" {
		s.t.Errorf("the restored filesystem has not grown: %s", s.sh("restored", "df -k /data"))
	}
	s.gone("restored")
	s.pod("cloned", onHost, "cloned")
	s.running("cloned")
	if got := s.sh("cloned", "cat /data/f"); got != "after" {
		s.t.Errorf("the clone has %q", got)
	}
	if got := s.sh("app", "cat /data/f"); got != "after" {
		s.t.Errorf("the source has %q", got)
	}
}

// group: two volumes of a running pod are cut at one moment.
func group(s *space) {
	s.claim("data", "256Mi")
	s.claim("more", "256Mi")
	s.kubectl("label", "pvc", "data", "more", "app=db")
	s.pod("app", microVM, "data", func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "more", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "more"},
		}})
		c := &p.Spec.Containers[0]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "more", MountPath: "/more"})
		// The second file never has a number that the first one has not.
		c.Command[2] = "trap exit TERM; i=0; while :; do i=$((i+1)); echo $i >> /data/log; sync; echo $i >> /more/log; sync; done"
	})
	s.running("app")
	s.sh("app", "until [ -s /more/log ]; do sleep 0.1; done") // both have a line by then
	s.apply(`apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshot
metadata: {name: both}
spec: {volumeGroupSnapshotClassName: crust, source: {selector: {matchLabels: {app: db}}}}
`)
	s.t.Cleanup(func() { s.kubectl("delete", "volumegroupsnapshots", "--all") })
	s.kubectl("wait", "volumegroupsnapshot/both", "--for=jsonpath={.status.readyToUse}=true", "--timeout=4m")
	s.gone("app")
	last := map[string]int{}
	for i, name := range strings.Fields(s.kubectl("get", "volumesnapshots", "-o", "jsonpath={.items[*].metadata.name}")) {
		claim, pod := fmt.Sprintf("restored-%d", i), fmt.Sprintf("check-%d", i)
		source := s.kubectl("get", "volumesnapshot", name, "-o", "jsonpath={.spec.source.persistentVolumeClaimName}")
		s.claim(claim, "256Mi", from("VolumeSnapshot", name))
		s.pod(pod, onHost, claim)
		s.running(pod)
		n, err := strconv.Atoi(s.sh(pod, "tail -1 /data/log"))
		must(s.t, err)
		last[source] = n
		s.gone(pod)
	}
	s.t.Logf("the last lines: %v", last)
	if ahead := last["data"] - last["more"]; len(last) != 2 || ahead < 0 || ahead > 1 {
		s.t.Errorf("the snapshots are of two moments: %v", last)
	}
}

// goldenImage makes a qcow2 image of an ext4 filesystem with a file.
func (s *space) goldenImage() string {
	s.t.Helper()
	dir := s.t.TempDir()
	must(s.t, os.Mkdir(filepath.Join(dir, "root"), 0o755))
	must(s.t, os.WriteFile(filepath.Join(dir, "root", "golden"), []byte("golden\n"), 0o644))
	raw, image := filepath.Join(dir, "raw"), filepath.Join(dir, "golden.qcow2")
	for _, argv := range [][]string{
		{"mkfs.ext4", "-q", "-d", filepath.Join(dir, "root"), raw, "64M"},
		{"qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, image},
	} {
		s.succeeds(exec.CommandContext(step(s.t), argv[0], argv[1:]...))
	}
	return image
}

// backingImages: scenarios 1, 2 and 4 of docs/backing-images.md; 3 is 4 for whoever comes second.
func backingImages(s *space) {
	s.claim("source", "128Mi")
	s.pod("writer", microVM, "source")
	s.running("writer")
	s.sh("writer", "echo exported > /data/golden; sync")
	s.snapshot("exported", "source", "crust-backing-image")
	s.gone("writer")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(s.t, err)
	image := s.goldenImage()
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, image) })}
	go func() { _ = server.Serve(l) }()
	s.t.Cleanup(func() { _ = server.Close() })
	s.apply(fmt.Sprintf(`apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: downloaded}
spec:
  driver: %s
  deletionPolicy: Delete
  volumeSnapshotClassName: crust-backing-image
  source: {snapshotHandle: "bi://backing?backingImageDataSourceType=download&backingImage=golden&url=http%%3A%%2F%%2F127.0.0.1%%3A%d%%2Fgolden.qcow2"}
  volumeSnapshotRef: {name: downloaded, namespace: %s}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: downloaded}
spec: {volumeSnapshotClassName: crust-backing-image, source: {volumeSnapshotContentName: downloaded}}
`, Driver, l.Addr().(*net.TCPAddr).Port, s.name))
	s.ready("downloaded")

	for _, name := range []string{"exported", "downloaded", "downloaded"} {
		claim := fmt.Sprintf("from-%s-%d", name, len(s.kubectl("get", "pvc", "-o", "name")))
		s.claim(claim, "256Mi", from("VolumeSnapshot", name))
		s.pod(claim, microVM, claim)
		s.running(claim)
		want := strings.Replace(name, "downloaded", "golden", 1)
		if got := s.sh(claim, "cat /data/golden"); got != want {
			s.t.Errorf("%s has %q", claim, got)
		}
		if size := s.sh(claim, "df -k /data | tail -1 | awk '{print ($2 > 200000)}'"); size != "1" {
			s.t.Errorf("the filesystem of %s has not grown: %s", claim, s.sh(claim, "df -k /data"))
		}
		s.gone(claim)
	}
}

// ranges collects what an iterator is told.
type ranges struct{ list []string }

func (r *ranges) SnapshotMetadataIteratorRecord(_ int, m iterator.IteratorMetadata) error {
	for _, b := range m.BlockMetadata {
		if b.GetByteOffset()%4096 != 0 || b.GetSizeBytes()%4096 != 0 {
			return fmt.Errorf("%d bytes at %d are no whole blocks", b.GetSizeBytes(), b.GetByteOffset())
		}
		r.list = append(r.list, fmt.Sprintf("%d %d", b.GetByteOffset()/4096, b.GetSizeBytes()/4096))
	}
	return nil
}

func (*ranges) SnapshotMetadataIteratorDone(int) error { return nil }

// changedBlocks makes an incremental backup with a service account's token, through Kubernetes' own sidecar, and compares it
// byte by byte, by devices that are restored from the snapshots.
func changedBlocks(s *space) {
	ca, err := os.ReadFile(s.pki("ca.crt"))
	must(s.t, err)
	s.apply(fmt.Sprintf(`apiVersion: cbt.storage.k8s.io/v1beta1
kind: SnapshotMetadataService
metadata: {name: %s}
spec: {audience: %s, address: "localhost:%s", caCert: %s}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: backup}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: backup}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: crust-snapshot-metadata-client}
subjects: [{kind: ServiceAccount, name: backup, namespace: %s}]
`, Driver, Driver, s.port("snapshot-metadata"), base64.StdEncoding.EncodeToString(ca), s.name))
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "dd if=/dev/urandom of=/data/one bs=64k count=100 2>/dev/null; sync")
	s.snapshot("monday", "data", "crust")
	s.sh("app", "dd if=/dev/urandom of=/data/one bs=64k count=3 seek=50 conv=notrunc 2>/dev/null; dd if=/dev/urandom of=/data/two bs=64k count=10 2>/dev/null; sync")
	s.snapshot("tuesday", "data", "crust")

	list := func(token string) ([]string, error) {
		clients, err := iterator.BuildClients(&rest.Config{Host: s.server(), BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAFile: s.pki("ca.crt")}})
		must(s.t, err)
		var r ranges
		err = iterator.GetSnapshotMetadata(step(s.t), iterator.Args{
			Clients: clients, Emitter: &r, Namespace: s.name, SnapshotName: "tuesday", PrevSnapshotName: "monday", SANamespace: s.name, SAName: "backup",
			TokenExpirySecs: iterator.DefaultTokenExpirySeconds,
		})
		return r.list, err
	}
	if _, err := list(strings.TrimSpace(s.kubectl("create", "token", "default"))); err == nil {
		s.t.Error("a service account without rights is served")
	}
	changed, err := list(strings.TrimSpace(s.kubectl("create", "token", "backup")))
	must(s.t, err)
	s.t.Logf("changed, in blocks of 4 KiB: %q", changed)

	block := corev1.PersistentVolumeBlock
	raw := func(spec *corev1.PersistentVolumeClaimSpec) {
		spec.VolumeMode = &block
		spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("256Mi")
	}
	for _, name := range []string{"monday", "tuesday"} {
		s.kubectl("annotate", "volumesnapshotcontent", s.content(name),
			"snapshot.storage.kubernetes.io/allow-volume-mode-change=true")
		s.claim(name, "256Mi", from("VolumeSnapshot", name), raw)
	}
	s.pod("backup", onHost, "monday", func(p *corev1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "tuesday", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "tuesday"},
		}})
		c := &p.Spec.Containers[0]
		c.VolumeMounts, c.VolumeDevices = nil, []corev1.VolumeDevice{{Name: "data", DevicePath: "/dev/monday"}, {Name: "tuesday", DevicePath: "/dev/tuesday"}}
	})
	s.running("backup")
	if got := s.sh("backup", "cmp -s /dev/monday /dev/tuesday; echo $?"); got != "1" {
		s.t.Errorf("before the backup, cmp says %s", got)
	}
	s.sh("backup", fmt.Sprintf("echo '%s' | while read at n; do dd if=/dev/tuesday of=/dev/monday bs=4096 skip=$at seek=$at count=$n conv=notrunc 2>/dev/null || exit 1; done", strings.Join(changed, "\n")))
	if got := s.sh("backup", "cmp /dev/monday /dev/tuesday; echo $?"); got != "0" {
		s.t.Errorf("after the backup: %s", got)
	}
}

var _ iterator.IteratorEmitter = (*ranges)(nil)
