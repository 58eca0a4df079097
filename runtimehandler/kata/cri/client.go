// Package cri asks the container runtime of a node which sandboxes a pod has, and what their containers mount (the
// RuntimeService of Kubernetes' container runtime interface). It changes nothing there, and opens a connection per
// question, so that either side may restart.
package cri

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	"crust.dev/crust/protocol/rpc"
)

// podLabel is where the kubelet writes a pod's uid (k8s.io/kubelet/pkg/types).
const podLabel = "io.kubernetes.pod.uid"

// maxMessage is what containerd and the kubelet use, in bytes.
const maxMessage = 16 << 20

// Client asks one container runtime.
type Client struct{ path string }

// New checks an endpoint. It does no I/O.
func New(endpoint string) (*Client, error) {
	path, err := rpc.ParseEndpoint(endpoint)
	if err != nil {
		return nil, fmt.Errorf("CRI: %w", err)
	}
	return &Client{path: path}, nil
}

// Sandbox is one of a pod's sandboxes that is ready.
type Sandbox struct {
	ID         string
	Handler    string // the handler of its RuntimeClass
	Containers []Container
}

// Container is one that was created in it, running or not.
type Container struct {
	Name    string
	Created time.Time
	Mounts  []Mount
}

// Mount is a directory of the host in a container.
type Mount struct{ HostPath, ContainerPath string }

// Sandboxes returns a pod's sandboxes that are ready, with their containers. ErrUnavailable if the container runtime does
// not answer.
func (c *Client) Sandboxes(ctx context.Context, podUID string) (list []Sandbox, err error) {
	// The container runtime's socket belongs to root; nothing else can listen there.
	conn, err := grpc.NewClient("unix:"+c.path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, fmt.Errorf("CRI: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	api := runtime.NewRuntimeServiceClient(conn)
	pods, err := api.ListPodSandbox(ctx, &runtime.ListPodSandboxRequest{Filter: &runtime.PodSandboxFilter{
		LabelSelector: map[string]string{podLabel: podUID},
		State:         &runtime.PodSandboxStateValue{State: runtime.PodSandboxState_SANDBOX_READY},
	}})
	if err != nil {
		return nil, c.failed("ListPodSandbox", err)
	}
	for _, pod := range pods.GetItems() {
		s := Sandbox{ID: pod.GetId(), Handler: pod.GetRuntimeHandler()}
		if s.Containers, err = c.containers(ctx, api, pod.GetId()); err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

func (c *Client) containers(ctx context.Context, api runtime.RuntimeServiceClient, sandbox string) ([]Container, error) {
	all, err := api.ListContainers(ctx, &runtime.ListContainersRequest{Filter: &runtime.ContainerFilter{PodSandboxId: sandbox}})
	if err != nil {
		return nil, c.failed("ListContainers", err)
	}
	var list []Container
	for _, item := range all.GetContainers() {
		if item.GetState() == runtime.ContainerState_CONTAINER_EXITED {
			continue
		}
		resp, err := api.ContainerStatus(ctx, &runtime.ContainerStatusRequest{ContainerId: item.GetId()})
		if errdefs.IsNotFound(rpc.FromWire(err)) {
			continue // it has gone meanwhile
		}
		if err != nil {
			return nil, c.failed("ContainerStatus", err)
		}
		status := resp.GetStatus()
		container := Container{Name: status.GetMetadata().GetName(), Created: time.Unix(0, status.GetCreatedAt())}
		for _, m := range status.GetMounts() {
			container.Mounts = append(container.Mounts, Mount{HostPath: m.GetHostPath(), ContainerPath: m.GetContainerPath()})
		}
		list = append(list, container)
	}
	return list, nil
}

// failed makes every failure ErrUnavailable: whatever the reason, nothing is known.
func (c *Client) failed(call string, err error) error {
	return fmt.Errorf("CRI at %s: %s: %v: %w", c.path, call, err, errdefs.ErrUnavailable)
}
