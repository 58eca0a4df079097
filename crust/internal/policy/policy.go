package policy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/protocol/csi/deferred"
)

// The values of the volume parameter crust.dev/defer.
const (
	Always = "always"
	Never  = "never"
	Auto   = "auto"
)

// Annotation is the pod's annotation: "*", or a comma-separated list of the names of volumes in the pod's specification.
const Annotation = deferred.ParameterDefer

// ParameterGroupChangePolicy is the volume parameter that stands for a pod's fsGroupChangePolicy where there is no API
// server to ask: Always or OnRootMismatch.
const ParameterGroupChangePolicy = "crust.dev/fs-group-change-policy"

// Config is a policy.
type Config struct {
	// Default stands for the parameter where a volume has none: Never or Auto.
	Default string
	// DefaultHandler is the runtime handler where nothing says which.
	DefaultHandler string
	// RuntimeClasses maps the handler of a RuntimeClass to the runtime handler for its pods.
	RuntimeClasses map[string]string
	// Pods reads pods; nil: there is no API server to ask.
	Pods Pods
}

// Policy decides.
type Policy struct {
	config Config
	rules  atomic.Pointer[Rules]
}

// Rules are what of a policy can change while it is used.
type Rules struct {
	// Default and RuntimeClasses are those of Config.
	Default        string
	RuntimeClasses map[string]string
}

// New checks a configuration. ErrInvalidArgument if it wants to know pods and has no way to.
func New(c Config) (*Policy, error) {
	if c.DefaultHandler == "" {
		return nil, fmt.Errorf("policy: no default handler: %w", errdefs.ErrInvalidArgument)
	}
	p := &Policy{config: c}
	return p, p.Set(Rules{Default: c.Default, RuntimeClasses: c.RuntimeClasses})
}

// Set changes the rules for all decisions that begin from now on. ErrInvalidArgument as for New; then nothing changes.
func (p *Policy) Set(r Rules) error {
	r.Default = cmp.Or(r.Default, Never)
	if err := CheckDefault(r.Default, p.config.Pods != nil); err != nil {
		return err
	}
	r.RuntimeClasses = maps.Clone(r.RuntimeClasses)
	p.rules.Store(&r)
	return nil
}

// Rules returns the rules that hold now. They are not to be changed.
func (p *Policy) Rules() Rules { return *p.rules.Load() }

// CheckDefault says whether a default can be had. pods says that there is a way to know pods. ErrInvalidArgument if not.
func CheckDefault(value string, pods bool) error {
	switch {
	case value != "" && value != Never && value != Auto:
		return fmt.Errorf("policy: default %q: want %s or %s: %w", value, Never, Auto, errdefs.ErrInvalidArgument)
	case value == Auto && !pods:
		return fmt.Errorf("policy: default %s needs to know pods; configure Kubernetes, or use %s: %w", Auto, Never, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Request is a volume that is to be published.
type Request struct {
	VolumeID      string
	TargetPath    string
	VolumeContext map[string]string
	Capability    *csi.VolumeCapability
}

// Decision is the answer.
type Decision struct {
	// Defer says whether the volume is deferred. The rest is only for those that are.
	Defer bool
	// Handler is the name of the runtime handler.
	Handler string
	// Pod is the pod, if there is a pod reader.
	Pod *Pod
	// GroupChangePolicy says when the files are given to the pod's fsGroup: as Kubernetes spells it, or empty.
	GroupChangePolicy string
	// SubPaths says that a container of the pod uses a directory of the volume (subPath).
	SubPaths bool
}

// Decide decides. ErrInvalidArgument for a parameter that means nothing; ErrFailedPrecondition for one that does not fit
// the volume's use; ErrUnavailable if the pod has to be known and is not.
func (p *Policy) Decide(ctx context.Context, req Request) (Decision, error) {
	rules := p.Rules()
	wish, err := p.wish(rules, req.VolumeContext)
	if err != nil {
		return Decision{}, err
	}
	block := req.Capability.GetMount() == nil
	switch {
	case wish == Never, wish == Auto && block:
		// A raw block volume is a device already; a runtime passes it on as one.
		return Decision{}, nil
	case block:
		return Decision{}, errBlock
	}
	d := Decision{Defer: true, GroupChangePolicy: req.VolumeContext[ParameterGroupChangePolicy], Handler: cmp.Or(req.VolumeContext[deferred.ParameterHandler], p.config.DefaultHandler)}
	if p.config.Pods == nil {
		return d, nil
	}
	if err := p.askPod(ctx, rules, req, &d); err != nil {
		return Decision{}, err
	}
	if wish != Always {
		if d.Defer, err = p.byPod(ctx, rules, req, d.Pod); err != nil || !d.Defer {
			return Decision{}, err
		}
	}
	if err := mountsInside(rules, req, d.Pod); err != nil {
		return Decision{}, err
	}
	return d, nil
}

// mountsInside refuses a pod without a RuntimeClass where RuntimeClasses are configured: its runtime is the node's default one,
// which is not known to mount volumes in sandboxes. Nobody would mount this one, and the pod would start with a directory that
// it cannot write to. An operator whose default runtime does mount them says so by an entry for the handler "".
func mountsInside(rules Rules, req Request, pod *Pod) error {
	_, known := rules.RuntimeClasses[""]
	if pod.RuntimeHandler != "" || known || len(rules.RuntimeClasses) == 0 || req.VolumeContext[deferred.ParameterHandler] != "" {
		return nil
	}
	return fmt.Errorf("volume %s is to be mounted inside a sandbox, but pod %s/%s has no RuntimeClass; set its runtimeClassName to a RuntimeClass "+
		"with one of the handlers %q, or, if the node's default runtime mounts volumes in sandboxes, add the handler \"\" to runtimeClasses "+
		"in crustd's configuration: %w",
		req.VolumeID, pod.Namespace, pod.Name, slices.Sorted(maps.Keys(rules.RuntimeClasses)), errdefs.ErrFailedPrecondition)
}

// AtStage says whether a volume that is to be staged will be deferred whatever pod it is for; a stage request does not
// say which that is. Its errors are those of Decide.
func (p *Policy) AtStage(volumeContext map[string]string, capability *csi.VolumeCapability) (bool, error) {
	wish, err := p.wish(p.Rules(), volumeContext)
	if err != nil || wish != Always {
		return false, err
	}
	if capability.GetMount() == nil {
		return false, errBlock
	}
	return true, nil
}

var errBlock = fmt.Errorf("%s is %q, but this is a raw block volume, which has no filesystem to defer; use a StorageClass "+
	"without that parameter for volumeMode Block: %w", deferred.ParameterDefer, Always, errdefs.ErrFailedPrecondition)

// wish is what the volume itself says.
func (p *Policy) wish(rules Rules, volumeContext map[string]string) (string, error) {
	wish, ok := volumeContext[deferred.ParameterDefer]
	switch {
	case !ok:
		return rules.Default, nil
	case wish == Auto && p.config.Pods == nil:
		return "", fmt.Errorf("%s is %q, which needs to know the pod, and no pod reader is configured; use %q or %q: %w",
			deferred.ParameterDefer, Auto, Always, Never, errdefs.ErrFailedPrecondition)
	case wish != Always && wish != Never && wish != Auto:
		return "", fmt.Errorf("%s is %q; want %s, %s or %s: %w", deferred.ParameterDefer, wish, Always, Never, Auto, errdefs.ErrInvalidArgument)
	}
	return wish, nil
}

// askPod completes a decision with what the pod says.
func (p *Policy) askPod(ctx context.Context, rules Rules, req Request, d *Decision) error {
	id, err := identify(req)
	if err != nil {
		return err
	}
	pod, err := p.config.Pods.Pod(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: pod %s: %w", req.VolumeID, id, err)
	}
	d.Pod = &pod
	d.GroupChangePolicy = cmp.Or(d.GroupChangePolicy, pod.FSGroupChangePolicy)
	if handler, ok := rules.RuntimeClasses[pod.RuntimeHandler]; ok && req.VolumeContext[deferred.ParameterHandler] == "" {
		d.Handler = handler
	}
	volume, err := p.volumeOf(ctx, req, pod)
	if err != nil {
		return err
	}
	d.SubPaths = slices.Contains(pod.SubPathVolumes, volume)
	return nil
}

// byPod says whether the pod asks for deferral of this volume, by its annotation or its RuntimeClass.
func (p *Policy) byPod(ctx context.Context, rules Rules, req Request, pod *Pod) (bool, error) {
	if list, ok := pod.Annotations[Annotation]; ok {
		names := strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
		for _, name := range names {
			if name != "*" && !slices.ContainsFunc(pod.Volumes, func(v Volume) bool { return v.Name == name }) {
				return false, fmt.Errorf("pod %s/%s: annotation %s names %q, which is none of its volumes: %w", pod.Namespace, pod.Name, Annotation, name, errdefs.ErrFailedPrecondition)
			}
		}
		volume, err := p.volumeOf(ctx, req, *pod)
		if err != nil {
			return false, err
		}
		if slices.Contains(names, "*") || slices.Contains(names, volume) {
			return true, nil
		}
	}
	_, ok := rules.RuntimeClasses[pod.RuntimeHandler]
	return ok, nil
}

// volumeOf returns the name that the pod's specification gives to the volume at a target path; the kubelet's own name for
// it is that of the PersistentVolume, or of the volume itself if it is inline.
func (p *Policy) volumeOf(ctx context.Context, req Request, pod Pod) (string, error) {
	spec, ok := specName(req.TargetPath)
	if !ok {
		return "", nil
	}
	for _, v := range pod.Volumes {
		if v.Claim == "" {
			if v.Name == spec {
				return v.Name, nil
			}
			continue
		}
		bound, err := p.config.Pods.VolumeOfClaim(ctx, pod.Namespace, v.Claim)
		if err != nil {
			return "", fmt.Errorf("volume %s: claim %s/%s: %w", req.VolumeID, pod.Namespace, v.Claim, err)
		}
		if bound == spec {
			return v.Name, nil
		}
	}
	return "", nil
}
