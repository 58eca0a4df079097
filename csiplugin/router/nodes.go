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
// anew for each call, from the API server's memory: expansions are rare, and nothing can be out of date here.
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
	list, err := n.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: n.label + "=" + string(pool), ResourceVersion: "0"})
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
			return place{}, fmt.Errorf("look for the node with pool %s: %w", pool, err)
		}
		return place{}, fmt.Errorf("look for the node with pool %s: the API server: %v: %w", pool, err, errdefs.ErrUnavailable)
	}
	found := list.Items
	if ready := slices.DeleteFunc(slices.Clone(found), func(node corev1.Node) bool { return !isReady(node) }); len(ready) > 0 {
		found = ready // the others may be where the pool was before
	}
	switch len(found) {
	case 0:
		return place{}, fmt.Errorf("no node is known to have pool %s: none has the label %s=%s, which the kubelet sets when crust-csi registers there; bring the node with the pool's disk back: %w",
			pool, n.label, pool, errdefs.ErrUnavailable)
	case 1:
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
