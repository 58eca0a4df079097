// Package sp is the daemon as CO: it calls a storage provider (a CSI driver) and speaks the CSI extension with it.
//
// The SP's own errors are relayed unchanged, because the CO in front of the daemon acts on their codes.
package sp

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// Provider is one CSI driver behind a connection, which may break and come back.
type Provider struct {
	conn *grpc.ClientConn
	node csi.NodeClient

	mu   sync.Mutex
	name string
}

// New returns the driver behind a connection. It does no I/O.
func New(conn *grpc.ClientConn) *Provider {
	return &Provider{conn: conn, node: csi.NewNodeClient(conn)}
}

// Conn is the connection, for calls that go through untouched.
func (p *Provider) Conn() *grpc.ClientConn { return p.conn }

// Node is the driver's node service.
func (p *Provider) Node() csi.NodeClient { return p.node }

// Name returns the driver's name. A driver never changes it, so it is asked for once.
func (p *Provider) Name(ctx context.Context) (string, error) {
	p.mu.Lock()
	name := p.name
	p.mu.Unlock()
	if name != "" {
		return name, nil
	}
	info, err := csi.NewIdentityClient(p.conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return "", rpc.Relay(err)
	}
	if info.GetName() == "" {
		return "", fmt.Errorf("the driver has no name: %w", errdefs.ErrInternal)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.name = info.GetName()
	return p.name, nil
}

// Probe says whether the driver is there and ready.
func (p *Provider) Probe(ctx context.Context) error {
	resp, err := csi.NewIdentityClient(p.conn).Probe(ctx, &csi.ProbeRequest{})
	if err != nil {
		return rpc.FromWire(err)
	}
	if ready := resp.GetReady(); ready != nil && !ready.GetValue() {
		return fmt.Errorf("the driver is not ready: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// Abilities is what a driver has declared.
type Abilities struct {
	// MountGroup: a CO hands it the pod's fsGroup (VOLUME_MOUNT_GROUP), and never applies that itself.
	MountGroup bool
}

// RequireDeferral is ErrFailedPrecondition unless the driver has declared DEFER_FS_OPS.
func (p *Provider) RequireDeferral(ctx context.Context) (Abilities, error) {
	resp, err := p.node.NodeGetCapabilities(deferred.Ask(ctx), &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return Abilities{}, rpc.Relay(err)
	}
	has := func(want csi.NodeServiceCapability_RPC_Type) bool {
		return slices.ContainsFunc(resp.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == want })
	}
	if !has(deferred.CapabilityDeferFSOps) {
		name, _ := p.Name(ctx)
		return Abilities{}, fmt.Errorf("driver %s cannot leave a filesystem to a sandbox: it has not declared DEFER_FS_OPS; use a driver that can, "+
			"or set %s to never: %w", name, deferred.ParameterDefer, errdefs.ErrFailedPrecondition)
	}
	return Abilities{MountGroup: has(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP)}, nil
}

// Volume is one volume at one target path as the deferrals' storage: a publish request, and what undoes it.
type Volume struct {
	provider *Provider
	driver   string
	publish  *csi.NodePublishVolumeRequest
}

// NewVolume returns the storage behind a publish request for a volume that is to be deferred.
func (p *Provider) NewVolume(driver string, req *csi.NodePublishVolumeRequest) *Volume {
	return &Volume{provider: p, driver: driver, publish: req}
}

// PublishedVolume returns the storage behind a volume that was published before, of which only the identity is known.
func (p *Provider) PublishedVolume(driver, volumeID, targetPath string) *Volume {
	return p.NewVolume(driver, &csi.NodePublishVolumeRequest{VolumeId: volumeID, TargetPath: targetPath})
}

// Publish asks the driver for the device and for what has to be mounted.
func (v *Volume) Publish(ctx context.Context) (runtimehandler.Deferral, error) {
	req, err := withDeferral(v.publish)
	if err != nil {
		return runtimehandler.Deferral{}, err
	}
	resp, err := v.provider.node.NodePublishVolume(ctx, req)
	if err != nil {
		return runtimehandler.Deferral{}, rpc.Relay(err)
	}
	var ext deferred.NodePublishVolumeResponseExtension
	if err := deferred.Get(resp, &ext); err != nil {
		return runtimehandler.Deferral{}, v.broken(err)
	}
	if err := ext.GetDeferredFilesystem().Validate(); err != nil {
		return runtimehandler.Deferral{}, v.broken(err)
	}
	return v.deferral(ext.GetDeferredFilesystem())
}

// broken is the error for a driver that has declared the extension and does not keep to it.
func (v *Volume) broken(err error) error {
	return fmt.Errorf("driver %s was asked to defer the filesystem of volume %s and answered something else: %v; report this to its author: %w",
		v.driver, v.publish.GetVolumeId(), err, errdefs.ErrInternal)
}

// withDeferral returns a copy of a request that asks for deferral, the group in both of the places where an SP may
// look for it (KEP-2857).
func withDeferral(req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeRequest, error) {
	req = proto.CloneOf(req)
	if err := deferred.Set(req, &deferred.NodePublishVolumeRequestExtension{DeferFsOps: true}); err != nil {
		return nil, err
	}
	mount := req.GetVolumeCapability().GetMount()
	if mount.GetVolumeMountGroup() == "" {
		return req, nil
	}
	return req, deferred.Set(mount, &deferred.MountVolumeExtension{VolumeSupplementalGroup: mount.GetVolumeMountGroup()})
}

func (v *Volume) deferral(fs *deferred.DeferredFilesystem) (runtimehandler.Deferral, error) {
	group, err := runtimehandler.ParseGroup(fs.GetSupplementalGroup())
	if err != nil {
		return runtimehandler.Deferral{}, v.broken(err)
	}
	// A driver need not know of groups: whoever mounts the filesystem applies them.
	if want := v.publish.GetVolumeCapability().GetMount().GetVolumeMountGroup(); want != fs.GetSupplementalGroup() && fs.GetSupplementalGroup() != "" {
		return runtimehandler.Deferral{}, v.broken(fmt.Errorf("supplemental group %q instead of %q", fs.GetSupplementalGroup(), want))
	}
	if v.publish.GetReadonly() && !fs.GetReadOnly() {
		return runtimehandler.Deferral{}, v.broken(fmt.Errorf("read-only was wanted"))
	}
	d := runtimehandler.Deferral{
		Driver:     v.driver,
		VolumeID:   v.publish.GetVolumeId(),
		TargetPath: v.publish.GetTargetPath(),
		Device:     fs.GetDevice(),
		Serial:     runtimehandler.Serial(v.driver, v.publish.GetVolumeId()),
		SizeBytes:  fs.GetSizeBytes(),
		FSType:     fs.GetFsType(),
		MountFlags: fs.GetMountFlags(),
		ReadOnly:   fs.GetReadOnly(),
		Format:     fs.GetFormatPolicy() == deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK,
		Group:      group,
	}
	if fs.GetNeverWritten() {
		d.Blankness = runtimehandler.BlanknessNeverWritten
	}
	if fs.GetSupplementalGroupChangePolicy() == deferred.GroupChangeOnRootMismatch {
		d.GroupChangePolicy = runtimehandler.GroupChangeOnRootMismatch
	}
	return d, nil
}

// Unpublish asks the driver to take the volume back. A volume that the driver does not know (any more) is not published.
func (v *Volume) Unpublish(ctx context.Context, neverMounted bool) error {
	req := &csi.NodeUnpublishVolumeRequest{VolumeId: v.publish.GetVolumeId(), TargetPath: v.publish.GetTargetPath()}
	if err := deferred.Set(req, &deferred.NodeUnpublishVolumeRequestExtension{DeferFsOps: true, NeverMounted: neverMounted}); err != nil {
		return err
	}
	_, err := v.provider.node.NodeUnpublishVolume(ctx, req)
	if err = rpc.Relay(err); rpc.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// Expand asks the driver to give a deferred volume's device the size that a request wants, and returns it.
func (v *Volume) Expand(ctx context.Context, req *csi.NodeExpandVolumeRequest) (int64, error) {
	req = proto.CloneOf(req)
	if err := deferred.Set(req, &deferred.NodeExpandVolumeRequestExtension{DeferFsOps: true}); err != nil {
		return 0, err
	}
	resp, err := v.provider.node.NodeExpandVolume(ctx, req)
	if err != nil {
		return 0, rpc.Relay(err)
	}
	if resp.GetCapacityBytes() <= 0 {
		return 0, fmt.Errorf("driver %s has expanded volume %s and did not say to what size; report this to its author: %w",
			v.driver, req.GetVolumeId(), errdefs.ErrInternal)
	}
	return resp.GetCapacityBytes(), nil
}
