package policy_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/policy"
	"crust.dev/crust/protocol/csi/deferred"
)

// cluster is a pod reader.
type cluster struct {
	pods   map[string]policy.Pod // by uid
	claims map[string]string     // "namespace/claim": volume
	err    error
}

func (c cluster) Pod(_ context.Context, id policy.PodID) (policy.Pod, error) {
	pod, ok := c.pods[id.UID]
	if !ok || c.err != nil {
		return pod, fmt.Errorf("no answer: %w", errdefs.ErrUnavailable)
	}
	return pod, nil
}

func (c cluster) VolumeOfClaim(_ context.Context, namespace, claim string) (string, error) {
	if c.err != nil {
		return "", c.err
	}
	return c.claims[namespace+"/"+claim], nil
}

const target = "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/pv-1/mount"

func mount() *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}}
}

func block() *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
}

func pod(annotation, runtime string) policy.Pod {
	p := policy.Pod{
		PodID:          policy.PodID{UID: "uid-1", Namespace: "ns", Name: "pod"},
		RuntimeHandler: runtime,
		Volumes:        []policy.Volume{{Name: "data", Claim: "claim-1"}, {Name: "logs", Claim: "claim-2"}, {Name: "scratch"}},
		SubPathVolumes: []string{"logs"},
	}
	if annotation != "" {
		p.Annotations = map[string]string{policy.Annotation: annotation}
	}
	return p
}

func TestDecide(t *testing.T) {
	claims := map[string]string{"ns/claim-1": "pv-1", "ns/claim-2": "pv-2"}
	reader := func(p policy.Pod) policy.Pods {
		return cluster{pods: map[string]policy.Pod{"uid-1": p}, claims: claims}
	}
	want := func(deferral bool, handler string) func(*testing.T, policy.Decision) {
		return func(t *testing.T, d policy.Decision) {
			t.Helper()
			if d.Defer != deferral || d.Handler != handler {
				t.Errorf("decision %+v, want %v %q", d, deferral, handler)
			}
		}
	}
	for _, tc := range []struct {
		name       string
		parameter  string
		handler    string
		def        string
		pods       policy.Pods
		capability *csi.VolumeCapability
		target     string
		context    map[string]string
		check      func(*testing.T, policy.Decision)
		err        error
		text       string
	}{
		{name: "nothing asks", check: want(false, "")},
		{name: "always", parameter: "always", check: want(true, "remote")},
		{name: "always for a certain handler", parameter: "always", handler: "kata", check: want(true, "kata")},
		{name: "never", parameter: "never", check: want(false, "")},
		{name: "nonsense", parameter: "yes", err: errdefs.ErrInvalidArgument, text: "want always, never or auto"},
		{name: "auto without pods", parameter: "auto", err: errdefs.ErrFailedPrecondition, text: "pod reader"},
		{name: "always for raw block", parameter: "always", capability: block(), err: errdefs.ErrFailedPrecondition, text: "raw block"},
		{name: "auto for raw block", parameter: "auto", pods: reader(pod("*", "kata-qemu")), capability: block(), check: want(false, "")},

		{name: "auto, and the pod says nothing", parameter: "auto", pods: reader(pod("", "")), check: want(false, "")},
		{name: "auto, by RuntimeClass", parameter: "auto", pods: reader(pod("", "kata-qemu")), check: want(true, "kata")},
		{name: "auto, by a RuntimeClass that is not configured", parameter: "auto", pods: reader(pod("", "gvisor")), check: want(false, "")},
		{name: "auto, by annotation for all", parameter: "auto", pods: reader(pod("*", "gvisor")), check: want(true, "remote")},
		{name: "auto, by annotation for this volume", parameter: "auto", pods: reader(pod("logs, data", "gvisor")), check: want(true, "remote")},
		{name: "auto, by annotation for another volume", parameter: "auto", pods: reader(pod("logs", "")), check: want(false, "")},
		{name: "auto, by annotation for another volume, and RuntimeClass", parameter: "auto", pods: reader(pod("logs", "kata-qemu")), check: want(true, "kata")},
		{name: "auto, by annotation for a volume that is not there", parameter: "auto", pods: reader(pod("dat", "")), err: errdefs.ErrFailedPrecondition, text: `"dat", which is none`},
		{name: "auto by default", def: "auto", pods: reader(pod("", "kata-qemu")), check: want(true, "kata")},
		{name: "never wins over everything", parameter: "never", def: "auto", pods: reader(pod("*", "kata-qemu")), check: want(false, "")},
		{name: "always, and the RuntimeClass says where", parameter: "always", pods: reader(pod("", "kata-qemu")), check: want(true, "kata")},
		{name: "always, and the volume says where", parameter: "always", handler: "remote", pods: reader(pod("", "kata-qemu")), check: want(true, "remote")},
		{name: "always, and no RuntimeClass", parameter: "always", pods: reader(pod("", "")), err: errdefs.ErrFailedPrecondition, text: `runtimeClassName to a RuntimeClass with one of the handlers ["kata-qemu"]`},
		{name: "by annotation, and no RuntimeClass", parameter: "auto", pods: reader(pod("*", "")), err: errdefs.ErrFailedPrecondition, text: "pod ns/pod has no RuntimeClass"},
		{name: "always, no RuntimeClass, and the volume says where", parameter: "always", handler: "remote", pods: reader(pod("", "")), check: want(true, "remote")},
		{name: "inline", parameter: "auto", pods: reader(pod("scratch", "gvisor")), target: "/k/pods/uid-1/volumes/kubernetes.io~csi/scratch/mount", check: want(true, "remote")},
		{name: "a part of the volume is used", parameter: "always", pods: reader(pod("", "gvisor")), target: "/k/pods/uid-1/volumes/kubernetes.io~csi/pv-2/mount", check: func(t *testing.T, d policy.Decision) {
			if !d.SubPaths {
				t.Errorf("decision %+v", d)
			}
		}},

		{name: "the API does not answer", parameter: "auto", pods: cluster{err: errdefs.ErrUnavailable}, err: errdefs.ErrUnavailable, text: "uid-1"},
		{name: "the API does not answer, and the volume is deferred always", parameter: "always", pods: cluster{err: errdefs.ErrUnavailable}, err: errdefs.ErrUnavailable},
		{name: "the API does not answer, and the volume is never deferred", parameter: "never", pods: cluster{err: errdefs.ErrUnavailable}, check: want(false, "")},
		{name: "a pod that is not there", parameter: "auto", pods: cluster{}, err: errdefs.ErrUnavailable},
		{name: "a target path of no pod", parameter: "auto", pods: reader(pod("*", "")), target: "/mnt/x", err: errdefs.ErrFailedPrecondition, text: "not that of a pod"},
		{name: "volume_context names another pod", parameter: "auto", pods: reader(pod("*", "")), context: map[string]string{"csi.storage.k8s.io/pod.uid": "uid-2"},
			err: errdefs.ErrFailedPrecondition, text: "podInfoOnMount"},
		{name: "volume_context names the same pod", parameter: "auto", pods: reader(pod("*", "gvisor")), context: map[string]string{"csi.storage.k8s.io/pod.uid": "uid-1"}, check: want(true, "remote")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := policy.New(policy.Config{Default: tc.def, DefaultHandler: "remote", RuntimeClasses: map[string]string{"kata-qemu": "kata"}, Pods: tc.pods})
			if err != nil {
				t.Fatal(err)
			}
			req := policy.Request{VolumeID: "v1", TargetPath: target, VolumeContext: map[string]string{}, Capability: tc.capability}
			if req.Capability == nil {
				req.Capability = mount()
			}
			if tc.target != "" {
				req.TargetPath = tc.target
			}
			for k, v := range tc.context {
				req.VolumeContext[k] = v
			}
			if tc.parameter != "" {
				req.VolumeContext[deferred.ParameterDefer] = tc.parameter
			}
			if tc.handler != "" {
				req.VolumeContext[deferred.ParameterHandler] = tc.handler
			}
			d, err := p.Decide(t.Context(), req)
			switch {
			case tc.err != nil:
				if !errors.Is(err, tc.err) || !strings.Contains(err.Error(), tc.text) {
					t.Errorf("error %v, want %v with %q", err, tc.err, tc.text)
				}
				if d.Defer {
					t.Error("and a deferral beside the error")
				}
			case err != nil:
				t.Error(err)
			default:
				tc.check(t, d)
			}
		})
	}
}

func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]policy.Config{
		"auto by default without pods": {Default: policy.Auto, DefaultHandler: "remote"},
		"always by default":            {Default: policy.Always, DefaultHandler: "remote"},
		"no handler":                   {},
	} {
		if _, err := policy.New(c); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
