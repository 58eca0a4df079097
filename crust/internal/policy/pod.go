package policy

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// Pods reads pods of this node. Errors are ErrUnavailable, whatever the reason: nothing is decided on what is not known.
type Pods interface {
	// Pod returns a pod.
	Pod(ctx context.Context, id PodID) (Pod, error)
	// VolumeOfClaim returns the name of the PersistentVolume that a PersistentVolumeClaim is bound to.
	VolumeOfClaim(ctx context.Context, namespace, claim string) (string, error)
}

// PodID names a pod. The uid is always known, the rest if the kubelet has said it.
type PodID struct {
	UID, Namespace, Name string
}

// String is for error texts.
func (id PodID) String() string {
	if id.Name == "" {
		return "with uid " + id.UID
	}
	return id.Namespace + "/" + id.Name
}

// Pod is what of a pod has to do with its volumes.
type Pod struct {
	PodID
	Annotations map[string]string
	// RuntimeHandler is the handler of its RuntimeClass; empty if it has none.
	RuntimeHandler string
	// FSGroup and FSGroupChangePolicy are those of its security context.
	FSGroup             *int64
	FSGroupChangePolicy string
	Volumes             []Volume
	// SubPathVolumes are the names of volumes of which a container uses a part only.
	SubPathVolumes []string
}

// Volume is a volume of a pod.
type Volume struct {
	Name string
	// Claim is the PersistentVolumeClaim behind it; empty for other volumes.
	Claim string
}

// The keys with which the kubelet says who the pod is (podInfoOnMount of the CSIDriver object).
const (
	podUIDKey       = "csi.storage.k8s.io/pod.uid"
	podNameKey      = "csi.storage.k8s.io/pod.name"
	podNamespaceKey = "csi.storage.k8s.io/pod.namespace"
)

// identify finds out which pod a volume is for. The target path tells, and volume_context, which anybody may have
// written unless podInfoOnMount is on, must agree.
func identify(req Request) (PodID, error) {
	uid, ok := podUID(req.TargetPath)
	if !ok {
		return PodID{}, fmt.Errorf("volume %s: target path %s is not that of a pod (.../pods/UID/volumes/kubernetes.io~csi/NAME/mount); "+
			"use %s always or never: %w", req.VolumeID, req.TargetPath, Annotation, errdefs.ErrFailedPrecondition)
	}
	id := PodID{UID: uid, Namespace: req.VolumeContext[podNamespaceKey], Name: req.VolumeContext[podNameKey]}
	if said := req.VolumeContext[podUIDKey]; said != "" && said != uid {
		return PodID{}, fmt.Errorf("volume %s: the target path is that of pod %s, volume_context says %s; set podInfoOnMount in the CSIDriver object: %w",
			req.VolumeID, uid, said, errdefs.ErrFailedPrecondition)
	}
	return id, nil
}

// podUID takes the pod's uid out of a target path as the kubelet makes it.
func podUID(target string) (string, bool) {
	parts := strings.Split(target, "/")
	for i := len(parts) - 1; i > 0; i-- {
		if parts[i] == "volumes" && i >= 2 && parts[i-2] == "pods" && parts[i-1] != "" {
			return parts[i-1], true
		}
	}
	return "", false
}

// specName takes the kubelet's name for a volume out of a target path.
func specName(target string) (string, bool) {
	parts := strings.Split(strings.TrimSuffix(target, "/"), "/")
	n := len(parts)
	if n < 3 || parts[n-1] != "mount" || parts[n-3] != "kubernetes.io~csi" {
		return "", false
	}
	return parts[n-2], true
}
