package router

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"crust.dev/crust/csiplugin/handle"
)

// nodes finds pools by the labels of Node objects, which the kubelet makes of what crust-csi answers to NodeGetInfo. It lists them
// anew for each call, from the memory of the API server where it can: calls are rare, and nothing can be out of date here.
type nodes struct {
	api kubernetes.Interface
	// label is the key that has the pool's id as its value.
	label string
	port  int
}

// requestTimeout bounds one request to the API server.
const requestTimeout = 10 * time.Second

// connect makes a client of the API server. It does not talk to it yet.
func connect(cfg Config) (*nodes, error) {
	config, err := rest.InClusterConfig()
	if cfg.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", cfg.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("API server: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	config.Timeout, config.UserAgent, config.QPS, config.Burst = requestTimeout, "crust-csi-router", 50, 100
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("API server: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return &nodes{api: api, label: cfg.DriverName + "/pool", port: cfg.Port}, nil
}

func (n *nodes) find(ctx context.Context, pool handle.Pool) (place, error) {
	found, err := n.list(ctx, metav1.ListOptions{LabelSelector: n.label + "=" + string(pool), ResourceVersion: "0"})
	if err != nil {
		return place{}, fmt.Errorf("look for the node with pool %s: %w", pool, err)
	}
	if len(found) == 0 {
		return place{}, fmt.Errorf("no node is known to have pool %s: none has the label %s=%s, which the kubelet sets when crust-csi registers there; bring the node with the pool's disk back: %w",
			pool, n.label, pool, errdefs.ErrUnavailable)
	}
	return n.choose(found, pool)
}

// all lists the nodes as they are now, not as the API server remembers them: who is left out is never told.
func (n *nodes) all(ctx context.Context) (map[handle.Pool]place, error) {
	found, err := n.list(ctx, metav1.ListOptions{LabelSelector: n.label})
	if err != nil {
		return nil, fmt.Errorf("look for the nodes with pools: %w", err)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no node is known to have a pool: none has the label %s, which the kubelet sets when crust-csi registers there; bring a node with a pool back: %w", n.label, errdefs.ErrUnavailable)
	}
	of := map[handle.Pool][]corev1.Node{}
	for _, node := range found {
		pool, err := handle.ParsePool(node.Labels[n.label])
		if err != nil {
			return nil, fmt.Errorf("the label %s of node %s is %.32q, which is no pool; remove it (kubectl label node %s %s-) and restart crust-csi there: %w",
				n.label, node.Name, node.Labels[n.label], node.Name, n.label, errdefs.ErrUnavailable)
		}
		of[pool] = append(of[pool], node)
	}
	places := map[handle.Pool]place{}
	for pool, nodes := range of {
		if places[pool], err = n.choose(nodes, pool); err != nil {
			return nil, err
		}
	}
	return places, nil
}

func (n *nodes) list(ctx context.Context, opts metav1.ListOptions) ([]corev1.Node, error) {
	list, err := n.api.CoreV1().Nodes().List(ctx, opts)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("the API server: %v: %w", err, errdefs.ErrUnavailable)
	}
	return list.Items, nil
}

// choose returns the one of the nodes with a pool's label that has the pool.
func (n *nodes) choose(found []corev1.Node, pool handle.Pool) (place, error) {
	if ready := slices.DeleteFunc(slices.Clone(found), func(node corev1.Node) bool { return !isReady(node) }); len(ready) > 0 {
		found = ready // the others may be where the pool was before
	}
	if len(found) == 1 {
		return n.placeOf(found[0], pool)
	}
	var names []string
	for _, node := range found {
		names = append(names, node.Name)
	}
	return place{}, fmt.Errorf("pool %s is on one node, and %s have the label %s=%s; take it off where the pool is not any more (kubectl label node NODE %s-): %w",
		pool, strings.Join(names, " and "), n.label, pool, n.label, errdefs.ErrUnavailable)
}

func isReady(node corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func (n *nodes) placeOf(node corev1.Node, pool handle.Pool) (place, error) {
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return place{node: node.Name, address: net.JoinHostPort(a.Address, strconv.Itoa(n.port))}, nil
		}
	}
	return place{}, fmt.Errorf("node %s, which has pool %s, has no InternalIP in its status; see to its kubelet: %w", node.Name, pool, errdefs.ErrUnavailable)
}
