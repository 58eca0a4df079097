package node

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

// Volume is one volume in the hands of a kubelet, and of the sidecars that create, expand and delete it.
type Volume struct {
	// Name is unique on the node.
	Name string
	// FSType is ext4 or xfs.
	FSType string
	// Pod is the uid of the pod that it is published for.
	Pod string
	// ID is the CSI volume id, from Create to Delete.
	ID string
	// Size is in bytes.
	Size int64
	// Context is the CSI volume context.
	Context map[string]string

	n *Node
}

// Volume returns one that is still to be created, with a filesystem of the given type. Close gives it back.
func (n *Node) Volume(name, fsType string) *Volume {
	v := &Volume{Name: name, FSType: fsType, n: n}
	n.volumes = append(n.volumes, v)
	return v
}

func (v *Volume) capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.FSType}},
	}
}

func (v *Volume) node() csi.NodeClient             { return csi.NewNodeClient(v.n.conn) }
func (v *Volume) controller() csi.ControllerClient { return csi.NewControllerClient(v.n.conn) }
func (v *Volume) staging() string                  { return v.n.Path("staging", v.Name) }

// Target is the path at which a kubelet would publish the volume for its pod.
func (v *Volume) Target() string {
	return v.n.Path("pods", v.Pod, "volumes", "kubernetes.io~csi", v.Name, "mount")
}

// Create creates the volume with at least so many bytes, to be deferred.
func (v *Volume) Create(ctx context.Context, size int64) error {
	resp, err := v.controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               v.Name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: size},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
		Parameters:         map[string]string{deferred.ParameterDefer: "always"},
	})
	if err != nil {
		return err
	}
	v.ID, v.Size, v.Context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetCapacityBytes(), resp.GetVolume().GetVolumeContext()
	if v.Size < size {
		return fmt.Errorf("asked for %s, got %s", MiB(size), MiB(v.Size))
	}
	return nil
}

// Stage is NodeStageVolume.
func (v *Volume) Stage(ctx context.Context) error {
	if err := os.MkdirAll(v.staging(), 0o750); err != nil {
		return err
	}
	_, err := v.node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.staging(), VolumeCapability: v.capability(), VolumeContext: v.Context,
	})
	return err
}

// Publish is NodePublishVolume for a pod.
func (v *Volume) Publish(ctx context.Context, pod string) error {
	v.Pod = pod
	if err := os.MkdirAll(filepath.Dir(v.Target()), 0o750); err != nil {
		return err
	}
	_, err := v.node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.ID, StagingTargetPath: v.staging(), TargetPath: v.Target(), VolumeCapability: v.capability(), VolumeContext: v.Context,
	})
	return err
}

// UnpublishRefused checks that the volume is not given back while a sandbox holds it.
func (v *Volume) UnpublishRefused(ctx context.Context) error {
	_, err := v.node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.Target()})
	if status.Code(err) != codes.FailedPrecondition {
		return fmt.Errorf("NodeUnpublishVolume answered %v, want FAILED_PRECONDITION", err)
	}
	return nil
}

// Unpublish is NodeUnpublishVolume, after which the target path is gone.
func (v *Volume) Unpublish(ctx context.Context) error {
	if _, err := v.node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.Target()}); err != nil {
		return err
	}
	if _, err := os.Lstat(v.Target()); !os.IsNotExist(err) {
		return fmt.Errorf("the target path is still there (%v)", err)
	}
	return nil
}

// Unstage is NodeUnstageVolume.
func (v *Volume) Unstage(ctx context.Context) error {
	_, err := v.node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging()})
	return err
}

// Delete is DeleteVolume.
func (v *Volume) Delete(ctx context.Context) error {
	_, err := v.controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
	if err == nil {
		v.ID = ""
	}
	return err
}

// Expand does what the resizer does and then what a kubelet does.
func (v *Volume) Expand(ctx context.Context, size int64) (int64, error) {
	want := &csi.CapacityRange{RequiredBytes: size}
	if _, err := v.controller().ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: v.ID, CapacityRange: want, VolumeCapability: v.capability(),
	}); err != nil {
		return 0, fmt.Errorf("ControllerExpandVolume: %w", err)
	}
	resp, err := v.node().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: v.Target(), StagingTargetPath: v.staging(), CapacityRange: want, VolumeCapability: v.capability(),
	})
	if err != nil {
		return 0, fmt.Errorf("NodeExpandVolume: %w", err)
	}
	if resp.GetCapacityBytes() < size {
		return 0, fmt.Errorf("asked for %s, got %s", MiB(size), MiB(resp.GetCapacityBytes()))
	}
	v.Size = resp.GetCapacityBytes()
	return v.Size, nil
}

// Stats returns the usage in bytes, by NodeGetVolumeStats.
func (v *Volume) Stats(ctx context.Context) (*csi.VolumeUsage, error) {
	resp, err := v.node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Target()})
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

// MiB is a size for people.
func MiB(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }
