package kube

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"crust.dev/crust/crust/internal/policy"
)

// component is who events come from.
const component = "crustd"

func (c *Client) startEvents(node string) {
	c.events = record.NewBroadcaster()
	c.events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: c.api.CoreV1().Events("")})
	c.recorder = c.events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: node})
}

// Event writes an event to a pod: what kubectl describe shows to its owner. Many of the same are counted as one, and
// none is ever waited for.
func (c *Client) Event(pod policy.PodID, warning bool, reason, message string) {
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	c.recorder.Event(&corev1.ObjectReference{
		Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
	}, kind, reason, message)
}
