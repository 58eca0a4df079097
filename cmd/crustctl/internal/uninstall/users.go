package uninstall

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"
)

// User is a pod on a node that has a volume of the driver. Volume is the name of the PersistentVolume, or that of an inline
// volume in the pod; Claim is empty for the latter.
type User struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Node      string `json:"node"`
	Claim     string `json:"claim,omitempty"`
	Volume    string `json:"volume"`
}

// Users lists who uses volumes of a driver, sorted by namespace, pod and volume. Pods that have no node yet, or have ended, use
// nothing.
func Users(ctx context.Context, api kubernetes.Interface, driver string) ([]User, error) {
	volumes, err := claimed(ctx, api, driver)
	if err != nil {
		return nil, err
	}
	var users []User
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return api.CoreV1().Pods("").List(ctx, o)
	}
	err = pager.New(list).EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
		if pod, ok := obj.(*corev1.Pod); ok {
			users = append(users, used(pod, driver, volumes)...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	slices.SortFunc(users, func(a, b User) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Volume, b.Volume))
	})
	return users, nil
}

// claim names a PersistentVolumeClaim.
type claim struct{ namespace, name string }

// claimed are the driver's PersistentVolumes by the claims that they are bound to.
func claimed(ctx context.Context, api kubernetes.Interface, driver string) (map[claim]string, error) {
	volumes := map[claim]string{}
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return api.CoreV1().PersistentVolumes().List(ctx, o)
	}
	err := pager.New(list).EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
		pv, ok := obj.(*corev1.PersistentVolume)
		if ok && pv.Spec.CSI != nil && pv.Spec.CSI.Driver == driver && pv.Spec.ClaimRef != nil {
			volumes[claim{pv.Spec.ClaimRef.Namespace, pv.Spec.ClaimRef.Name}] = pv.Name
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list PersistentVolumes: %w", err)
	}
	return volumes, nil
}

// used are the volumes of the driver that a pod uses.
func used(pod *corev1.Pod, driver string, volumes map[claim]string) []User {
	if pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	var users []User
	for _, v := range pod.Spec.Volumes {
		user := User{Namespace: pod.Namespace, Pod: pod.Name, Node: pod.Spec.NodeName}
		switch {
		case v.CSI != nil && v.CSI.Driver == driver:
			user.Volume = v.Name
		case v.PersistentVolumeClaim != nil:
			user.Claim = v.PersistentVolumeClaim.ClaimName
		case v.Ephemeral != nil:
			user.Claim = pod.Name + "-" + v.Name // its name by Kubernetes' rule
		}
		if user.Claim != "" {
			user.Volume = volumes[claim{pod.Namespace, user.Claim}]
		}
		if user.Volume != "" {
			users = append(users, user)
		}
	}
	return users
}
