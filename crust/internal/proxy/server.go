package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/policy"
	"crust.dev/crust/crust/internal/sp"
	"crust.dev/crust/protocol/rpc"
)

// ownMethods are the methods of the node service that do not just go through.
var ownMethods = []string{
	"NodeStageVolume",
	"NodeUnstageVolume",
	"NodePublishVolume",
	"NodeUnpublishVolume",
	"NodeGetVolumeStats",
	"NodeGetVolumeHealth",
	"NodeExpandVolume",
	"NodeGetCapabilities",
}

// Config is what a proxy works with.
type Config struct {
	Provider  *sp.Provider
	Deferrals *deferrals.Manager
	Policy    *policy.Policy
	Log       *slog.Logger
}

// NewServer returns the gRPC server that stands in the driver's place. ctx is that of rpc.NewServer.
func NewServer(ctx context.Context, c Config) (*grpc.Server, error) {
	if c.Provider == nil || c.Deferrals == nil || c.Policy == nil || c.Log == nil {
		return nil, fmt.Errorf("proxy: a provider, deferrals, a policy and a logger are needed: %w", errdefs.ErrInvalidArgument)
	}
	server := rpc.NewServer(ctx, c.Log,
		grpc.ForceServerCodecV2(newFrameCodec()),
		grpc.UnknownServiceHandler(passThrough(c.Provider.Conn())))
	desc := csi.Node_ServiceDesc
	desc.Methods = slices.DeleteFunc(slices.Clone(desc.Methods), func(m grpc.MethodDesc) bool { return !slices.Contains(ownMethods, m.MethodName) })
	server.RegisterService(&desc, &node{provider: c.Provider, deferrals: c.Deferrals, policy: c.Policy})
	return server, nil
}

// node answers for deferrals and hands on the rest.
type node struct {
	csi.UnimplementedNodeServer // for the methods that are not registered
	provider                    *sp.Provider
	deferrals                   *deferrals.Manager
	policy                      *policy.Policy
}
