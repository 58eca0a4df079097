package kube

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	nodelisters "k8s.io/client-go/listers/node/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"

	"crust.dev/crust/crust/internal/policy"
)

const (
	// uidIndex finds a pod by its uid.
	uidIndex = "uid"
	// freshness is how long a pod that the kubelet talks of may take to reach us.
	freshness = 3 * time.Second
	// requestTimeout bounds one request to the API server.
	requestTimeout = 10 * time.Second
)

// Config says which API server, and which node.
type Config struct {
	// Kubeconfig is a file; empty: the service account of the pod that we run in.
	Kubeconfig string
	// Node is the name of this node's Node object.
	Node string
}

// Client reads pods of a node. It keeps a copy of them up to date while Run runs.
type Client struct {
	api       kubernetes.Interface
	pods      cache.SharedIndexInformer
	classes   cache.SharedIndexInformer
	handlers  nodelisters.RuntimeClassLister
	informers []informers.SharedInformerFactory
	events    record.EventBroadcaster
	recorder  record.EventRecorder
}

var _ policy.Pods = (*Client)(nil)

// Connect makes a client. It does not talk to the API server yet.
func Connect(c Config) (*Client, error) {
	if c.Node == "" {
		return nil, fmt.Errorf("kubernetes: the name of the node is needed: %w", errdefs.ErrInvalidArgument)
	}
	config, err := rest.InClusterConfig()
	if c.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	config.Timeout = requestTimeout
	config.UserAgent = "crustd"
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return New(api, c.Node)
}

// New makes a client over an API.
func New(api kubernetes.Interface, node string) (*Client, error) {
	ofNode := informers.NewSharedInformerFactoryWithOptions(api, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
		}),
		informers.WithTransform(slim))
	all := informers.NewSharedInformerFactoryWithOptions(api, 0, informers.WithTransform(slim))
	c := &Client{
		api:       api,
		pods:      ofNode.Core().V1().Pods().Informer(),
		classes:   all.Node().V1().RuntimeClasses().Informer(),
		handlers:  all.Node().V1().RuntimeClasses().Lister(),
		informers: []informers.SharedInformerFactory{ofNode, all},
	}
	err := c.pods.AddIndexers(cache.Indexers{uidIndex: func(obj any) ([]string, error) {
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return nil, nil
		}
		return []string{string(pod.UID)}, nil
	}})
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	c.startEvents(node)
	return c, nil
}

// slim drops what nobody asks for before it is kept.
func slim(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Pod:
		o.ManagedFields, o.Status = nil, corev1.PodStatus{}
	case *nodev1.RuntimeClass:
		o.ManagedFields = nil
	}
	return obj, nil
}

// Run keeps the copy up to date until ctx ends.
func (c *Client) Run(ctx context.Context) error {
	defer c.events.Shutdown()
	for _, f := range c.informers {
		f.Start(ctx.Done())
	}
	<-ctx.Done()
	for _, f := range c.informers {
		f.Shutdown()
	}
	return nil
}

// Ready is nil if the copy is complete.
func (c *Client) Ready(context.Context) error {
	if !c.Synced() {
		return fmt.Errorf("the API server has not answered yet: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// Synced says whether the copy is complete.
func (c *Client) Synced() bool { return c.pods.HasSynced() && c.classes.HasSynced() }

// Pod returns a pod of this node. The kubelet may know a pod before we do, so it is waited for, for a little while.
func (c *Client) Pod(ctx context.Context, id policy.PodID) (policy.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, freshness)
	defer cancel()
	for {
		pod, err := c.find(id)
		if err == nil {
			return c.describe(pod)
		}
		select {
		case <-ctx.Done():
			return policy.Pod{}, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (c *Client) find(id policy.PodID) (*corev1.Pod, error) {
	if !c.Synced() {
		return nil, fmt.Errorf("the API server has not answered yet: %w", errdefs.ErrUnavailable)
	}
	found, err := c.pods.GetIndexer().ByIndex(uidIndex, id.UID)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w: %w", err, errdefs.ErrUnavailable)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("the API server knows no pod with uid %s on this node: %w", id.UID, errdefs.ErrUnavailable)
	}
	pod, ok := found[0].(*corev1.Pod)
	if !ok || id.Name != "" && (pod.Name != id.Name || pod.Namespace != id.Namespace) {
		return nil, fmt.Errorf("the pod with uid %s is not %s: %w", id.UID, id, errdefs.ErrUnavailable)
	}
	return pod, nil
}

// describe says of a pod what has to do with its volumes.
func (c *Client) describe(pod *corev1.Pod) (policy.Pod, error) {
	p := policy.Pod{
		PodID:       policy.PodID{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
		Annotations: pod.Annotations,
	}
	if name := pod.Spec.RuntimeClassName; name != nil && *name != "" {
		class, err := c.handlers.Get(*name)
		if err != nil {
			return policy.Pod{}, fmt.Errorf("RuntimeClass %s: %w: %w", *name, err, errdefs.ErrUnavailable)
		}
		p.RuntimeHandler = class.Handler
	}
	if s := pod.Spec.SecurityContext; s != nil {
		p.FSGroup = s.FSGroup
		if s.FSGroupChangePolicy != nil {
			p.FSGroupChangePolicy = string(*s.FSGroupChangePolicy)
		}
	}
	for _, v := range pod.Spec.Volumes {
		p.Volumes = append(p.Volumes, policy.Volume{Name: v.Name, Claim: claimOf(pod, v)})
	}
	p.SubPathVolumes = subPathVolumes(pod)
	return p, nil
}

// claimOf returns the claim behind a volume. That of a generic ephemeral volume is called after pod and volume.
func claimOf(pod *corev1.Pod, v corev1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return pod.Name + "-" + v.Name
	}
	return ""
}

func subPathVolumes(pod *corev1.Pod) []string {
	var names []string
	add := func(mounts []corev1.VolumeMount) {
		for _, m := range mounts {
			if m.SubPath != "" || m.SubPathExpr != "" {
				names = append(names, m.Name)
			}
		}
	}
	for _, c := range pod.Spec.InitContainers {
		add(c.VolumeMounts)
	}
	for _, c := range pod.Spec.Containers {
		add(c.VolumeMounts)
	}
	for _, c := range pod.Spec.EphemeralContainers {
		add(c.VolumeMounts)
	}
	return names
}

// VolumeOfClaim asks the API server; it is needed only where a pod's annotation names volumes.
func (c *Client) VolumeOfClaim(ctx context.Context, namespace, claim string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pvc, err := c.api.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, claim, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", nil // it may not have been made yet; then it is not this volume's
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	return pvc.Spec.VolumeName, nil
}
