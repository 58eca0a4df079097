package kube_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"crust.dev/crust/crust/internal/kube"
	"crust.dev/crust/crust/internal/policy"
)

func ptr[T any](v T) *T { return &v }

func pod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: "uid-" + "1", Annotations: map[string]string{"a": "b"}},
		Spec: corev1.PodSpec{
			NodeName:         "node-1",
			RuntimeClassName: ptr("kata"),
			SecurityContext:  &corev1.PodSecurityContext{FSGroup: ptr[int64](7), FSGroupChangePolicy: ptr(corev1.FSGroupChangeOnRootMismatch)},
			Volumes: []corev1.Volume{
				{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
				{Name: "conf", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}},
			},
			InitContainers: []corev1.Container{{VolumeMounts: []corev1.VolumeMount{{Name: "data", SubPath: "x"}}}},
			Containers:     []corev1.Container{{VolumeMounts: []corev1.VolumeMount{{Name: "conf"}, {Name: "tmp", SubPathExpr: "$(X)"}}}},
		},
	}
}

func class() *nodev1.RuntimeClass {
	return &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "kata"}, Handler: "kata-qemu"}
}

func start(t *testing.T, api *fake.Clientset) *kube.Client {
	t.Helper()
	c, err := kube.New(api, "node-1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestPod(t *testing.T) {
	api := fake.NewClientset(pod("pod"), class())
	c := start(t, api)
	got, err := c.Pod(t.Context(), policy.PodID{UID: "uid-1", Namespace: "ns", Name: "pod"})
	if err != nil {
		t.Fatal(err)
	}
	want := policy.Pod{
		PodID: policy.PodID{UID: "uid-1", Namespace: "ns", Name: "pod"}, Annotations: map[string]string{"a": "b"}, RuntimeHandler: "kata-qemu",
		FSGroup: ptr[int64](7), FSGroupChangePolicy: "OnRootMismatch",
		Volumes:        []policy.Volume{{Name: "data", Claim: "claim"}, {Name: "tmp", Claim: "pod-tmp"}, {Name: "conf"}},
		SubPathVolumes: []string{"data", "tmp"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}

	t.Run("only pods of this node are watched", func(t *testing.T) {
		for _, a := range api.Actions() {
			list, ok := a.(clienttesting.ListAction)
			if ok && a.GetResource().Resource == "pods" && list.GetListRestrictions().Fields.String() != "spec.nodeName=node-1" {
				t.Errorf("listed pods with field selector %q", list.GetListRestrictions().Fields)
			}
		}
	})
	t.Run("a pod of another name", func(t *testing.T) {
		_, err := c.Pod(t.Context(), policy.PodID{UID: "uid-1", Namespace: "ns", Name: "other"})
		if !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("pod: %v", err)
		}
	})
	t.Run("a pod that arrives late", func(t *testing.T) {
		late := pod("late")
		late.UID = "uid-2"
		time.AfterFunc(100*time.Millisecond, func() {
			if _, err := api.CoreV1().Pods("ns").Create(context.Background(), late, metav1.CreateOptions{}); err != nil {
				t.Error(err)
			}
		})
		if _, err := c.Pod(t.Context(), policy.PodID{UID: "uid-2"}); err != nil {
			t.Error(err)
		}
	})
	t.Run("a RuntimeClass that is not there", func(t *testing.T) {
		odd := pod("odd")
		odd.UID, odd.Spec.RuntimeClassName = "uid-3", ptr("none")
		if _, err := api.CoreV1().Pods("ns").Create(t.Context(), odd, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Pod(t.Context(), policy.PodID{UID: "uid-3"}); !errors.Is(err, errdefs.ErrUnavailable) {
			t.Errorf("pod: %v", err)
		}
	})
}

func TestAPIThatFails(t *testing.T) {
	api := fake.NewClientset(pod("pod"), class())
	api.PrependReactor("*", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("down") })
	c := start(t, api)
	if _, err := c.Pod(t.Context(), policy.PodID{UID: "uid-1"}); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "not answered") {
		t.Errorf("pod: %v", err)
	}
	if _, err := c.VolumeOfClaim(t.Context(), "ns", "claim"); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("claim: %v", err)
	}
	if c.Synced() {
		t.Error("it says that it is up to date")
	}
}

func TestVolumeOfClaim(t *testing.T) {
	c := start(t, fake.NewClientset(&corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "claim"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv-1"},
	}))
	for claim, want := range map[string]string{"claim": "pv-1", "none": ""} {
		if got, err := c.VolumeOfClaim(t.Context(), "ns", claim); err != nil || got != want {
			t.Errorf("claim %s: %q, %v; want %q", claim, got, err, want)
		}
	}
}

func TestEvent(t *testing.T) {
	api := fake.NewClientset()
	c := start(t, api)
	c.Event(policy.PodID{UID: "uid-1", Namespace: "ns", Name: "pod"}, true, "DeferralRefused", "because")
	deadline := time.Now().Add(10 * time.Second)
	for {
		events, err := api.CoreV1().Events("ns").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
			return e.Reason == "DeferralRefused" && e.Type == "Warning" && e.InvolvedObject.Name == "pod" && e.Message == "because"
		}) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("events: %v", events.Items)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestConnectRefuses(t *testing.T) {
	for _, c := range []kube.Config{{}, {Node: "n"}, {Node: "n", Kubeconfig: "/nonexistent"}} {
		if _, err := kube.Connect(c); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("Connect(%+v): %v", c, err)
		}
	}
}
