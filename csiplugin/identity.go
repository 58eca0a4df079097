package csiplugin

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
)

// register registers the services of the plugin's mode.
func (p *Plugin) register(server *grpc.Server, s *store) {
	csi.RegisterIdentityServer(server, &identity{name: p.cfg.DriverName, version: p.cfg.Version, store: s})
	poolv1.RegisterPoolServer(server, &status{store: s, driver: p.cfg.DriverName, directory: p.cfg.PoolDir})
	imagesv1.RegisterImagesServer(server, &imageService{images: s.images})
	if p.cfg.Mode.controller() {
		c := &controller{store: s}
		csi.RegisterControllerServer(server, c)
		csi.RegisterGroupControllerServer(server, &groupController{controller: c})
		poolv1.RegisterBasesServer(server, &basesService{store: s})
		csi.RegisterSnapshotMetadataServer(server, &snapshotMetadata{store: s, block: p.cfg.MetadataBlock})
	}
	if p.cfg.Mode.node() {
		csi.RegisterNodeServer(server, &node{store: s, id: p.cfg.NodeID})
	}
}

type identity struct {
	csi.UnimplementedIdentityServer
	name, version string
	store         *store
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.name, VendorVersion: i.version}, nil
}

// GetPluginCapabilities is the same in every mode: it is about the plugin as a whole (CSI, GetPluginCapabilities).
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

// Probe looks whether the pool's storage and catalog answer. Nobody is served before the pool is open, so a plugin that
// answers is ready. It is cheap and may be called every few seconds.
func (i *identity) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if _, err := i.store.engine.Capacity(ctx); err != nil {
		return nil, precondition("pool %s: %v", i.store.pool, err)
	}
	// This fails where the filesystem has been shut down, or is read-only. That it is full is not the plugin's fault.
	if err := i.store.catalog.Reserve(); err != nil && !errors.Is(err, errdefs.ErrResourceExhausted) {
		return nil, precondition("pool %s: %v", i.store.pool, err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}
