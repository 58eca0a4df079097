package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"crust.dev/crust/test/vm"
)

// kube is a one-node Kubernetes as its users see it.
type kube struct {
	*Cluster
	api kubernetes.Interface
}

// startKube starts a cluster in one of two ways: Start or StartDeployed. When a test has failed, the logs of all its programs are
// copied to the directory CRUST_KEEP_LOGS, if that is set.
func startKube(t testing.TB, up func(ctx context.Context, root, bin, dir string, progress io.Writer) (*Cluster, error)) *kube {
	t.Helper()
	need(t)
	vm.Accel(t) // found out before pods wait for it
	root, err := filepath.Abs("../../..")
	must(t, err)
	bin, err := Build(t.Context(), root, os.Stderr)
	must(t, err)
	start := time.Now()
	c, err := up(t.Context(), root, bin, "/var/tmp", os.Stderr)
	must(t, err)
	t.Logf("the cluster was up after %v", time.Since(start).Round(time.Second))
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range slices.DeleteFunc([]*Process{c.Daemon, c.Driver}, func(p *Process) bool { return p == nil }) {
				raw, _ := os.ReadFile(p.Log())
				t.Logf("%s:\n%s", p.Name, raw[max(0, len(raw)-8000):])
			}
			if kept := os.Getenv("CRUST_KEEP_LOGS"); kept != "" {
				must(t, os.CopyFS(filepath.Join(kept, filepath.Base(c.Dir)), os.DirFS(c.path("logs"))))
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	must(t, err)
	api, err := kubernetes.NewForConfig(config)
	must(t, err)
	return &kube{c, api}
}

// scenario is one of the plays, in a namespace of its name.
type scenario struct {
	name string
	play func(*space)
}

func (k *kube) play(t *testing.T, list []scenario) {
	for _, s := range list {
		t.Run(s.name, func(t *testing.T) {
			start := time.Now()
			t.Cleanup(func() {
				fmt.Fprintf(os.Stderr, "cluster: %s: failed %v, %v\n", s.name, t.Failed(), time.Since(start).Round(time.Second))
			})
			s.play(k.in(t, s.name))
		})
	}
}

// kubeletSays asks the kubelet itself: the API server forwards nothing to loopback.
func (k *kube) kubeletSays(ctx context.Context, path string) ([]byte, error) {
	client, err := rest.UnversionedRESTClientFor(&rest.Config{
		Host: "https://localhost:" + k.port("kubelet"), ContentConfig: rest.ContentConfig{NegotiatedSerializer: scheme.Codecs},
		// The kubelet has made its certificate itself.
		TLSClientConfig: rest.TLSClientConfig{CertFile: k.pki("admin.crt"), KeyFile: k.pki("admin.key"), Insecure: true},
	})
	if err != nil {
		return nil, err
	}
	return client.Get().AbsPath(path).DoRaw(ctx)
}

// space is the namespace of one scenario.
type space struct {
	*kube
	t    testing.TB
	name string
}

// in makes the namespace of a scenario. At its end everything in it is deleted, and so are its volumes.
func (k *kube) in(t testing.TB, name string) *space {
	t.Helper()
	s := &space{k, t, name}
	_, err := k.api.CoreV1().Namespaces().Create(step(t), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("events:\n%s", s.kubectl("get", "events", "-o", "custom-columns=OBJECT:.involvedObject.name,REASON:.reason,MESSAGE:.message", "--sort-by=.lastTimestamp"))
		}
		// Snapshots first: the controllers hold on to what they are made from.
		s.kubectl("delete", "pods", "--all")
		s.kubectl("delete", "volumesnapshots", "--all")
		s.kubectl("delete", "pvc", "--all")
		must(t, k.api.CoreV1().Namespaces().Delete(step(t), name, metav1.DeleteOptions{}))
		eventually(t, "the volumes of "+name+" are gone", func(ctx context.Context) error {
			list, err := k.api.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
			if err != nil {
				return err
			}
			for _, pv := range list.Items {
				if pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.Namespace == name {
					return fmt.Errorf("%s is %s", pv.Name, pv.Status.Phase)
				}
			}
			return nil
		})
	})
	eventually(t, "the service account of "+name, func(ctx context.Context) error {
		_, err := k.api.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	return s
}

// kubectl runs a command that must succeed, in the namespace, and returns what it prints.
func (s *space) kubectl(args ...string) string {
	s.t.Helper()
	return s.succeeds(s.Kubectl(step(s.t), append([]string{"--namespace", s.name}, args...)...))
}

// succeeds runs a command that must, and returns what it prints.
func (s *space) succeeds(cmd *exec.Cmd) string {
	s.t.Helper()
	start := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
	if took := time.Since(start); took > slow {
		s.t.Logf("%v: %s", took.Round(time.Second/10), cmd)
	}
	return string(out)
}

// apply gives objects to the API server; those without a namespace get this one.
func (s *space) apply(yaml string) {
	s.t.Helper()
	cmd := s.Kubectl(step(s.t), "--namespace", s.name, "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(yaml)
	s.succeeds(cmd)
}

// claim makes a claim of the storage class for a filesystem.
func (s *space) claim(name, size string, change ...func(*corev1.PersistentVolumeClaimSpec)) {
	s.t.Helper()
	class := "crust"
	spec := corev1.PersistentVolumeClaimSpec{
		StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}},
	}
	for _, c := range change {
		c(&spec)
	}
	_, err := s.api.CoreV1().PersistentVolumeClaims(s.name).Create(step(s.t),
		&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	must(s.t, err)
}

// from has a claim made from another object.
func from(kind, name string) func(*corev1.PersistentVolumeClaimSpec) {
	return func(spec *corev1.PersistentVolumeClaimSpec) {
		spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kind, Name: name}
		if group := "snapshot.storage.k8s.io"; kind == "VolumeSnapshot" {
			spec.DataSource.APIGroup = &group
		}
	}
}

// idle is what containers do that are only looked into.
const idle = "trap exit TERM; while :; do sleep 1; done"

// container is one of a pod's that runs a shell script with the volume "data" at /data.
func container(name, script string) corev1.Container {
	return corev1.Container{
		Name: name, Image: Image, ImagePullPolicy: corev1.PullNever, Command: []string{"/bin/sh", "-c", script},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		VolumeMounts:             []corev1.VolumeMount{{Name: "data", MountPath: "/data"}},
	}
}

// pod makes a pod of a runtime class with one idle container and a claim as volume "data".
func (s *space) pod(name, class, claim string, change ...func(*corev1.Pod)) {
	s.t.Helper()
	seconds := int64(1)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		HostNetwork: true, TerminationGracePeriodSeconds: &seconds, Containers: []corev1.Container{container("main", idle)},
		Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}}},
	}}
	if class != "" {
		p.Spec.RuntimeClassName = &class
	}
	for _, c := range change {
		c(p)
	}
	_, err := s.api.CoreV1().Pods(s.name).Create(step(s.t), p, metav1.CreateOptions{})
	must(s.t, err)
}

// The runtime classes of the tests' pods: a microVM, and a process of the host.
const (
	microVM = "crust"
	onHost  = ""
)

// running waits until all containers of a pod run.
func (s *space) running(name string) *corev1.Pod {
	s.t.Helper()
	var pod *corev1.Pod
	eventually(s.t, "pod "+name+" runs", func(ctx context.Context) (err error) {
		if pod, err = s.api.CoreV1().Pods(s.name).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		ready := func(c corev1.ContainerStatus) bool { return c.Ready }
		if pod.Status.Phase != corev1.PodRunning || len(pod.Status.ContainerStatuses) == 0 || !all(pod.Status.ContainerStatuses, ready) {
			status, _ := json.Marshal(pod.Status.ContainerStatuses)
			return fmt.Errorf("it is %s: %s", pod.Status.Phase, status)
		}
		return nil
	})
	return pod
}

func all[T any](list []T, is func(T) bool) bool {
	return !slices.ContainsFunc(list, func(x T) bool { return !is(x) })
}

// sh runs a script in a container of a pod, the first one if none is named, and returns what it prints.
func (s *space) sh(pod, script string, in ...string) string {
	s.t.Helper()
	args := []string{"exec", pod}
	for _, c := range in {
		args = append(args, "-c", c)
	}
	return strings.TrimSpace(s.kubectl(append(args, "--", "/bin/sh", "-c", script)...))
}

// gone deletes a pod and waits until it has gone.
func (s *space) gone(pod string) {
	s.t.Helper()
	s.kubectl("delete", "pod", pod, "--timeout=4m")
}

// says waits for an event of an object that has all of the texts.
func (s *space) says(object string, texts ...string) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("an event of %s with %q", object, texts), func(ctx context.Context) error {
		list, err := s.api.CoreV1().Events(s.name).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + object})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if all(texts, func(text string) bool { return strings.Contains(e.Message, text) }) {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// volume is the PersistentVolume of a claim, once it is bound.
func (s *space) volume(claim string) *corev1.PersistentVolume {
	s.t.Helper()
	var pv *corev1.PersistentVolume
	eventually(s.t, "claim "+claim+" is bound", func(ctx context.Context) error {
		pvc, err := s.api.CoreV1().PersistentVolumeClaims(s.name).Get(ctx, claim, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if pvc.Status.Phase != corev1.ClaimBound {
			return fmt.Errorf("it is %s", pvc.Status.Phase)
		}
		pv, err = s.api.CoreV1().PersistentVolumes().Get(ctx, pvc.Spec.VolumeName, metav1.GetOptions{})
		return err
	})
	return pv
}

// hostMounts are the filesystem types that the host has mounted for a claim in whatever pod.
func (s *space) hostMounts(claim string) []string {
	s.t.Helper()
	raw, err := os.ReadFile("/proc/self/mountinfo")
	must(s.t, err)
	var types []string
	for line := range strings.Lines(string(raw)) {
		if mount, filesystem, ok := strings.Cut(line, " - "); ok && strings.Contains(mount, s.volume(claim).Name) {
			types = append(types, strings.Fields(filesystem)[0])
		}
	}
	return types
}
