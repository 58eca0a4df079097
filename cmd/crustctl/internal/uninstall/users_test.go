package uninstall_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"crust.dev/crust/cmd/crustctl/internal/uninstall"
)

const driver = "csi.crust.dev"

func volume(name, driver, namespace, claim string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver}},
		ClaimRef:               &corev1.ObjectReference{Namespace: namespace, Name: claim},
	}}
}

func pod(name string, phase corev1.PodPhase, node string, sources ...corev1.VolumeSource) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: name}, Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase}}
	for _, s := range sources {
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "data", VolumeSource: s})
	}
	return p
}

func claims(name string) corev1.VolumeSource {
	return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
}

func TestUsers(t *testing.T) {
	objects := []runtime.Object{
		volume("pv-ours", driver, "app", "ours"),
		volume("pv-generic", driver, "app", "generic-data"),
		volume("pv-theirs", "other.example.com", "app", "theirs"),
		volume("pv-elsewhere", driver, "elsewhere", "theirs"),
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv-free"}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver}}}},
	}
	inline := corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: driver}}
	foreign := corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "other.example.com"}}
	for _, row := range []struct {
		name string
		pod  *corev1.Pod
		want []uninstall.User
	}{
		{"a running pod", pod("p", corev1.PodRunning, "n1", claims("ours")), []uninstall.User{{"app", "p", "n1", "ours", "pv-ours"}}},
		{"a pod that is being started", pod("p", corev1.PodPending, "n1", claims("ours")), []uninstall.User{{"app", "p", "n1", "ours", "pv-ours"}}},
		{"a pod whose node is silent", pod("p", corev1.PodUnknown, "n1", claims("ours")), []uninstall.User{{"app", "p", "n1", "ours", "pv-ours"}}},
		{"a claim that the pod brings along", pod("generic", corev1.PodRunning, "n1", corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}),
			[]uninstall.User{{"app", "generic", "n1", "generic-data", "pv-generic"}}},
		{"an inline volume", pod("p", corev1.PodRunning, "n1", inline), []uninstall.User{{"app", "p", "n1", "", "data"}}},
		{"several volumes", pod("p", corev1.PodRunning, "n1", claims("theirs"), claims("ours"), inline, foreign),
			[]uninstall.User{{"app", "p", "n1", "", "data"}, {"app", "p", "n1", "ours", "pv-ours"}}},
		{"no node yet", pod("p", corev1.PodPending, "", claims("ours")), nil},
		{"it has ended well", pod("p", corev1.PodSucceeded, "n1", claims("ours")), nil},
		{"it has ended badly", pod("p", corev1.PodFailed, "n1", claims("ours")), nil},
		{"another driver's volume, and a claim of the same name in another namespace", pod("p", corev1.PodRunning, "n1", claims("theirs"), foreign), nil},
		{"a claim that is not bound", pod("p", corev1.PodRunning, "n1", claims("none")), nil},
		{"no volume", pod("p", corev1.PodRunning, "n1", corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}), nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := uninstall.Users(t.Context(), fake.NewClientset(append(objects, row.pod)...), driver)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// TestWhatCannotBeReadIsNoAnswer: an API server that refuses must never look like a cluster without pods.
func TestWhatCannotBeReadIsNoAnswer(t *testing.T) {
	for _, resource := range []string{"pods", "persistentvolumes"} {
		api := fake.NewClientset(volume("pv-ours", driver, "app", "ours"))
		refused := errors.New("refused")
		api.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, refused })
		if got, err := uninstall.Users(t.Context(), api, driver); !errors.Is(err, refused) || got != nil {
			t.Errorf("%s: %v, %v", resource, got, err)
		}
	}
}
