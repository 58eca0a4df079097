package router

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"crust.dev/crust/csiplugin/handle"
)

const (
	here  = "0123456789ab"
	label = "csi.example.com/pool"
)

// node is one that has a pool; its addresses are of the types in turn.
func node(name, pool string, ready corev1.ConditionStatus, addresses ...corev1.NodeAddress) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: pool}},
		Status: corev1.NodeStatus{
			Addresses:  addresses,
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: ready}},
		},
	}
}

func address(kind corev1.NodeAddressType, text string) corev1.NodeAddress {
	return corev1.NodeAddress{Type: kind, Address: text}
}

func TestPoolsAreFoundByLabels(t *testing.T) {
	inside := address(corev1.NodeInternalIP, "10.0.0.1")
	other := node("other", "ba9876543210", corev1.ConditionTrue, address(corev1.NodeInternalIP, "10.0.0.9"))
	for name, row := range map[string]struct {
		nodes []runtime.Object
		want  place
		text  string
	}{
		"a node":                       {[]runtime.Object{other, node("n", here, corev1.ConditionTrue, address(corev1.NodeExternalIP, "1.2.3.4"), inside)}, place{"n", "10.0.0.1:9812"}, ""},
		"an address of version 6":      {[]runtime.Object{node("n", here, corev1.ConditionTrue, address(corev1.NodeInternalIP, "fd00::1"))}, place{"n", "[fd00::1]:9812"}, ""},
		"two addresses":                {[]runtime.Object{node("n", here, corev1.ConditionTrue, inside, address(corev1.NodeInternalIP, "fd00::1"))}, place{"n", "10.0.0.1:9812"}, ""},
		"a node that is not ready":     {[]runtime.Object{node("n", here, corev1.ConditionUnknown, inside)}, place{"n", "10.0.0.1:9812"}, ""},
		"a ready one and one that was": {[]runtime.Object{node("n", here, corev1.ConditionTrue, inside), node("was", here, corev1.ConditionUnknown, inside)}, place{"n", "10.0.0.1:9812"}, ""},
		"two that are ready":           {[]runtime.Object{node("a", here, corev1.ConditionTrue, inside), node("b", here, corev1.ConditionTrue, inside)}, place{}, "a and b"},
		"none":                         {[]runtime.Object{other}, place{}, "no node is known to have pool " + here},
		"one with a name only":         {[]runtime.Object{node("n", here, corev1.ConditionTrue, address(corev1.NodeHostName, "n"))}, place{}, "InternalIP"},
	} {
		t.Run(name, func(t *testing.T) {
			n := &nodes{api: fake.NewClientset(row.nodes...), label: label, port: DefaultPort}
			got, err := n.find(t.Context(), here)
			if got != row.want || (err == nil) != (row.text == "") || err != nil && (!errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), row.text)) {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
}

func TestAllPoolsAreFoundByLabels(t *testing.T) {
	const there = "ba9876543210"
	inside, outside := address(corev1.NodeInternalIP, "10.0.0.1"), address(corev1.NodeInternalIP, "10.0.0.2")
	unlabelled := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "none"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{inside}}}
	for name, row := range map[string]struct {
		nodes []runtime.Object
		want  map[handle.Pool]place
		text  string
	}{
		"two and one without": {[]runtime.Object{node("a", here, corev1.ConditionTrue, inside), node("b", there, corev1.ConditionUnknown, outside), unlabelled},
			map[handle.Pool]place{here: {"a", "10.0.0.1:9812"}, there: {"b", "10.0.0.2:9812"}}, ""},
		"one that has moved": {[]runtime.Object{node("a", here, corev1.ConditionUnknown, inside), node("b", here, corev1.ConditionTrue, outside)},
			map[handle.Pool]place{here: {"b", "10.0.0.2:9812"}}, ""},
		"one that two ready ones have": {[]runtime.Object{node("a", here, corev1.ConditionTrue, inside), node("b", here, corev1.ConditionTrue, outside), node("c", there, corev1.ConditionTrue, inside)}, nil, "a and b"},
		"none":                         {[]runtime.Object{unlabelled}, nil, "no node is known to have a pool"},
		"a label that is no pool":      {[]runtime.Object{node("a", here, corev1.ConditionTrue, inside), node("b", "off", corev1.ConditionTrue, outside)}, nil, "kubectl label node b"},
		"one without an address":       {[]runtime.Object{node("a", here, corev1.ConditionTrue)}, nil, "InternalIP"},
	} {
		t.Run(name, func(t *testing.T) {
			n := &nodes{api: fake.NewClientset(row.nodes...), label: label, port: DefaultPort}
			got, err := n.all(t.Context())
			if !maps.Equal(got, row.want) || (err == nil) != (row.text == "") || err != nil && (!errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), row.text)) {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
}

func TestAnAPIServerThatDoesNotAnswer(t *testing.T) {
	api := fake.NewClientset()
	api.PrependReactor("list", "nodes", func(kubetesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("it burns") })
	n := &nodes{api: api, label: label, port: DefaultPort}
	_, findErr := n.find(t.Context(), here)
	_, allErr := n.all(t.Context())
	for _, err := range []error{findErr, allErr} {
		if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "it burns") {
			t.Errorf("got %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.find(ctx, here); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v when the caller has gone", err)
	}
}
