package kata

import (
	"context"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ServeCRI has the node's container runtime answer questions until the test ends, or stop is called. It returns the
// endpoint.
func (n *Node) ServeCRI() (endpoint string, stop func()) {
	n.t.Helper()
	path := n.Path("run/cri.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		n.t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		n.t.Fatal(err)
	}
	server := grpc.NewServer()
	runtime.RegisterRuntimeServiceServer(server, criServer{node: n})
	go func() { _ = server.Serve(l) }()
	n.t.Cleanup(server.Stop)
	return "unix://" + path, server.Stop
}

type criServer struct {
	runtime.UnimplementedRuntimeServiceServer
	node *Node
}

func (c criServer) ListPodSandbox(_ context.Context, req *runtime.ListPodSandboxRequest) (*runtime.ListPodSandboxResponse, error) {
	resp := &runtime.ListPodSandboxResponse{}
	for _, s := range c.node.all() {
		if s.Pod == req.GetFilter().GetLabelSelector()["io.kubernetes.pod.uid"] {
			resp.Items = append(resp.Items, &runtime.PodSandbox{Id: s.ID, State: runtime.PodSandboxState_SANDBOX_READY, RuntimeHandler: "kata-" + string(s.Runtime)})
		}
	}
	return resp, nil
}

func (c criServer) ListContainers(_ context.Context, req *runtime.ListContainersRequest) (*runtime.ListContainersResponse, error) {
	resp := &runtime.ListContainersResponse{}
	for _, s := range c.node.all() {
		if s.ID != req.GetFilter().GetPodSandboxId() {
			continue
		}
		s.mu.Lock()
		for _, container := range s.containers {
			resp.Containers = append(resp.Containers, &runtime.Container{Id: container.id, PodSandboxId: s.ID, State: runtime.ContainerState_CONTAINER_RUNNING})
		}
		s.mu.Unlock()
	}
	return resp, nil
}

func (c criServer) ContainerStatus(_ context.Context, req *runtime.ContainerStatusRequest) (*runtime.ContainerStatusResponse, error) {
	for _, s := range c.node.all() {
		s.mu.Lock()
		for _, container := range s.containers {
			if container.id != req.GetContainerId() {
				continue
			}
			st := &runtime.ContainerStatus{Id: container.id, Metadata: &runtime.ContainerMetadata{Name: container.id}, CreatedAt: container.created.UnixNano()}
			for _, m := range container.mounts {
				st.Mounts = append(st.Mounts, &runtime.Mount{HostPath: m.Source, ContainerPath: m.Destination})
			}
			s.mu.Unlock()
			return &runtime.ContainerStatusResponse{Status: st}, nil
		}
		s.mu.Unlock()
	}
	return nil, status.Error(codes.NotFound, "no such container")
}
