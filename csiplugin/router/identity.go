package router

import (
	"context"
	"fmt"
	"path"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type identity struct {
	csi.UnimplementedIdentityServer
	name, version string
	router        *Router
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.name, VendorVersion: i.version}, nil
}

// GetPluginCapabilities is what sidecars of the services that are here want to see.
func (i *identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		service(csi.PluginCapability_Service_SNAPSHOT_ACCESSIBILITY_CONSTRAINTS),
		service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
			Type: csi.PluginCapability_VolumeExpansion_ONLINE,
		}}},
	}}, nil
}

// Probe is ready as soon as it can be asked. Whether a node answers is that node's matter. It waits for the lock that every call
// takes: if that is never given back, no call comes through, and neither does this one.
func (i *identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	i.router.mu.Lock()
	defer i.router.mu.Unlock()
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// elsewhere are the methods of the Controller service that are not passed on, and who calls them where.
var elsewhere = map[string]string{
	"CreateVolume": provisioner, "DeleteVolume": provisioner, "GetCapacity": provisioner, "ValidateVolumeCapabilities": provisioner,
	"ListVolumes": ofItsPool, "ControllerListVolumeHealth": ofItsPool + ", for an external-health-monitor beside it",
	"ControllerPublishVolume": nobody, "ControllerUnpublishVolume": nobody,
}

const (
	provisioner = "the crust-csi of each node serves it for the csi-provisioner beside it (--node-deployment)"
	ofItsPool   = "it is about all pools, and the crust-csi of each node serves it for its own"
	kubelets    = "the crust-csi of each node serves it for the kubelet and for crustctl there"
	nobody      = "nothing is attached, so nobody serves it"
)

// refuse is an interceptor that says who serves what the router does not.
func refuse(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if who, not := elsewhere[path.Base(info.FullMethod)]; not {
		return nil, notHere(info.FullMethod, who)
	}
	return next(ctx, req)
}

// refuseStream is refuse for services that the router does not have.
func refuseStream(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	return notHere(method, kubelets)
}

func notHere(method, who string) error {
	return fmt.Errorf("%s is not served by the router: %s: %w", path.Base(method), who, errdefs.ErrNotImplemented)
}
