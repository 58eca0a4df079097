package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/protocol/csi/deferred"
)

// volume is one volume in the hands of a kubelet, and of the sidecars that create, expand and delete it.
type volume struct {
	w       *world
	fsType  string
	id      string
	size    int64
	context map[string]string
	pod     string // the pod that it is published for
}

func (v *volume) capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.fsType}},
	}
}

func (v *volume) node() csi.NodeClient             { return csi.NewNodeClient(v.w.conn) }
func (v *volume) controller() csi.ControllerClient { return csi.NewControllerClient(v.w.conn) }
func (v *volume) staging() string                  { return v.w.path("staging", v.fsType) }

// target is the path at which a kubelet would publish the volume for its pod.
func (v *volume) target() string {
	return v.w.path("pods", v.pod, "volumes", "kubernetes.io~csi", "demo-"+v.fsType, "mount")
}

func (v *volume) create(ctx context.Context, size int64) (string, error) {
	resp, err := v.controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               "demo-" + v.fsType,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
		Parameters:         map[string]string{deferred.ParameterDefer: "always"},
	})
	if err != nil {
		return "", err
	}
	v.id, v.size, v.context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetCapacityBytes(), resp.GetVolume().GetVolumeContext()
	if v.size < size {
		return "", fmt.Errorf("asked for %s, got %s", mib(size), mib(v.size))
	}
	return fmt.Sprintf("asked for %s, got %s", mib(size), mib(v.size)), nil
}

func (v *volume) stage(ctx context.Context) (string, error) {
	if err := os.MkdirAll(v.staging(), 0o750); err != nil {
		return "", err
	}
	_, err := v.node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(), VolumeCapability: v.capability(), VolumeContext: v.context,
	})
	return "", err
}

func (v *volume) publish(ctx context.Context) (string, error) {
	if err := os.MkdirAll(filepath.Dir(v.target()), 0o750); err != nil {
		return "", err
	}
	_, err := v.node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(), TargetPath: v.target(), VolumeCapability: v.capability(), VolumeContext: v.context,
	})
	return "nothing is mounted on the host", err
}

// unpublishRefused checks that the volume is not given back while a sandbox holds it.
func (v *volume) unpublishRefused(ctx context.Context) (string, error) {
	_, err := v.node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target()})
	if status.Code(err) != codes.FailedPrecondition {
		return "", fmt.Errorf("NodeUnpublishVolume answered %v, want FAILED_PRECONDITION", err)
	}
	return status.Code(err).String(), nil
}

func (v *volume) unpublish(ctx context.Context) (string, error) {
	if _, err := v.node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target()}); err != nil {
		return "", err
	}
	if _, err := os.Lstat(v.target()); !os.IsNotExist(err) {
		return "", fmt.Errorf("the target path is still there (%v)", err)
	}
	return "", nil
}

func (v *volume) unstage(ctx context.Context) (string, error) {
	_, err := v.node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging()})
	return "", err
}

func (v *volume) remove(ctx context.Context) (string, error) {
	_, err := v.controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	if err == nil {
		v.id = ""
	}
	return "", err
}

// expand does what the resizer does and then what a kubelet does.
func (v *volume) expand(ctx context.Context, size int64) (int64, error) {
	want := &csi.CapacityRange{RequiredBytes: size}
	if _, err := v.controller().ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: want, VolumeCapability: v.capability(),
	}); err != nil {
		return 0, fmt.Errorf("ControllerExpandVolume: %w", err)
	}
	resp, err := v.node().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: v.target(), StagingTargetPath: v.staging(), CapacityRange: want, VolumeCapability: v.capability(),
	})
	if err != nil {
		return 0, fmt.Errorf("NodeExpandVolume: %w", err)
	}
	if resp.GetCapacityBytes() < size {
		return 0, fmt.Errorf("asked for %s, got %s", mib(size), mib(resp.GetCapacityBytes()))
	}
	v.size = resp.GetCapacityBytes()
	return v.size, nil
}

// stats returns the usage in bytes.
func (v *volume) stats(ctx context.Context) (*csi.VolumeUsage, error) {
	resp, err := v.node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target()})
	if err != nil {
		return nil, err
	}
	for _, u := range resp.GetUsage() {
		if u.GetUnit() == csi.VolumeUsage_BYTES {
			return u, nil
		}
	}
	return nil, fmt.Errorf("no usage in bytes in %v", resp)
}

func mib(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }
