// Package sptest is a storage provider for tests: a CSI driver in memory that speaks the extension, keeps the rules of
// CSI about repeated calls, and can be told to fail, to hang and to break its word.
package sptest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/protocol/csi/deferred"
)

// Name is the driver's name.
const Name = "csi.example.com"

// Driver is the fake. Its exported fields may be changed while no call is under way.
type Driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer

	Dir string // where the image files of volumes are
	// Capabilities of the node service.
	Capabilities []csi.NodeServiceCapability_RPC_Type
	// OnHost, if set, mounts a volume that is not deferred; its opposite is an unmount of the target path.
	OnHost func(device, target string) error
	// Answer, if set, changes what a deferred publish returns.
	Answer func(*deferred.DeferredFilesystem)

	mu        sync.Mutex
	before    func(ctx context.Context, method string) error
	calls     []string
	published map[string]string // target path: volume id
	unpublish []*deferred.NodeUnpublishVolumeRequestExtension
}

// New returns a driver that can defer, with its files in a directory of the test.
func New(t testing.TB) *Driver {
	return &Driver{
		Dir:       t.TempDir(),
		published: map[string]string{},
		Capabilities: []csi.NodeServiceCapability_RPC_Type{
			csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
			csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
			csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
			deferred.CapabilityDeferFSOps,
			deferred.CapabilitySupplementalGroup,
		},
	}
}

// Volume makes the image file of a volume, all hole.
func (d *Driver) Volume(t testing.TB, id string, size int64) string {
	t.Helper()
	path := d.device(id)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

func (d *Driver) device(id string) string { return filepath.Join(d.Dir, id+".img") }

// Serve serves the driver on a socket until the function that it returns is called.
func (d *Driver) Serve(t testing.TB, path string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(insecure.NewCredentials()))
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	return sync.OnceFunc(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Calls returns the methods of the node service that were called, and forgets them.
func (d *Driver) Calls() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	calls := d.calls
	d.calls = nil
	return calls
}

// Published returns the target paths of published volumes with their ids.
func (d *Driver) Published() map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	published := map[string]string{}
	for target, id := range d.published {
		published[target] = id
	}
	return published
}

// Unpublished returns the extensions of the unpublish requests so far.
func (d *Driver) Unpublished() []*deferred.NodeUnpublishVolumeRequestExtension {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.unpublish
}

// Before sets what runs at the start of every call of the node service, with the method's name; its error is returned.
func (d *Driver) Before(fn func(ctx context.Context, method string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.before = fn
}

func (d *Driver) begin(ctx context.Context, method string) error {
	d.mu.Lock()
	d.calls = append(d.calls, method)
	before := d.before
	d.mu.Unlock()
	if before != nil {
		return before(ctx, method)
	}
	return nil
}

// GetPluginInfo has the name and a vendor version.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: Name, VendorVersion: "test"}, nil
}

// Probe says that it is ready.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

// GetCapacity stands for a method that the daemon knows nothing of: it answers with a header and a trailer.
func (d *Driver) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if req.GetParameters()["fail"] != "" {
		st, err := status.New(codes.ResourceExhausted, "full").WithDetails(&csi.Topology{Segments: map[string]string{"zone": "a"}})
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	resp := &csi.GetCapacityResponse{AvailableCapacity: 42}
	resp.ProtoReflect().SetUnknown(req.ProtoReflect().GetUnknown())
	return resp, nil
}

// NodeGetCapabilities returns Capabilities.
func (d *Driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range d.Capabilities {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}},
		})
	}
	return resp, nil
}

// NodeGetInfo goes through the daemon untouched.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "node"}, nil
}

// NodeStageVolume succeeds.
func (d *Driver) NodeStageVolume(ctx context.Context, _ *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, d.begin(ctx, "NodeStageVolume")
}

// NodeUnstageVolume succeeds.
func (d *Driver) NodeUnstageVolume(ctx context.Context, _ *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, d.begin(ctx, "NodeUnstageVolume")
}

// NodePublishVolume notes the publish, and answers with a deferred filesystem if asked.
func (d *Driver) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := d.begin(ctx, "NodePublishVolume"); err != nil {
		return nil, err
	}
	info, err := os.Stat(d.device(req.GetVolumeId()))
	if err != nil {
		return nil, status.Errorf(codes.NotFound, "no volume %s", req.GetVolumeId())
	}
	d.mu.Lock()
	d.published[req.GetTargetPath()] = req.GetVolumeId()
	d.mu.Unlock()
	resp := &csi.NodePublishVolumeResponse{}
	var ext deferred.NodePublishVolumeRequestExtension
	if err := deferred.Get(req, &ext); err != nil {
		return nil, err
	}
	if !ext.GetDeferFsOps() {
		if d.OnHost != nil {
			return resp, d.OnHost(d.device(req.GetVolumeId()), req.GetTargetPath())
		}
		return resp, nil
	}
	fs := &deferred.DeferredFilesystem{
		Device:            d.device(req.GetVolumeId()),
		FsType:            req.GetVolumeCapability().GetMount().GetFsType(),
		MountFlags:        req.GetVolumeCapability().GetMount().GetMountFlags(),
		ReadOnly:          req.GetReadonly(),
		SupplementalGroup: req.GetVolumeCapability().GetMount().GetVolumeMountGroup(),
		SizeBytes:         info.Size(),
	}
	if !req.GetReadonly() {
		fs.FormatPolicy, fs.NeverWritten = deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK, true
	}
	if d.Answer != nil {
		d.Answer(fs)
	}
	return resp, deferred.Set(resp, &deferred.NodePublishVolumeResponseExtension{DeferredFilesystem: fs})
}

// NodeUnpublishVolume forgets the publish.
func (d *Driver) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := d.begin(ctx, "NodeUnpublishVolume"); err != nil {
		return nil, err
	}
	ext := &deferred.NodeUnpublishVolumeRequestExtension{}
	if err := deferred.Get(req, ext); err != nil {
		return nil, err
	}
	if d.OnHost != nil && !ext.GetDeferFsOps() {
		_ = syscall.Unmount(req.GetTargetPath(), 0)
		_ = os.Remove(req.GetTargetPath())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unpublish = append(d.unpublish, proto.CloneOf(ext))
	delete(d.published, req.GetTargetPath())
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// NodeGetVolumeStats answers for host mounts, with a number that gives it away.
func (d *Driver) NodeGetVolumeStats(ctx context.Context, _ *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := d.begin(ctx, "NodeGetVolumeStats"); err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: 4711}}}, nil
}

// NodeExpandVolume gives the image file the required size.
func (d *Driver) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if err := d.begin(ctx, "NodeExpandVolume"); err != nil {
		return nil, err
	}
	path := d.device(req.GetVolumeId())
	info, err := os.Stat(path)
	if err != nil {
		return nil, status.Errorf(codes.NotFound, "no volume %s", req.GetVolumeId())
	}
	size := max(info.Size(), req.GetCapacityRange().GetRequiredBytes())
	if err := os.Truncate(path, size); err != nil {
		return nil, fmt.Errorf("expand: %w", err)
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: size}, nil
}

// Hang is something for Before that waits until its caller gives up.
func Hang(ctx context.Context, _ string) error {
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
	}
	return status.Error(codes.DeadlineExceeded, "hung")
}
