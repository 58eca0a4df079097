package csiplugin

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
)

// Reasons of NodeGetVolumeHealth.
const (
	reasonDataLost   = "VolumeDataLost"
	reasonUnreadable = "VolumeDataUnreadable"
	reasonReadOnly   = "FilesystemReadOnly"
	reasonShutDown   = "FilesystemShutDown"
	reasonPoolFull   = "PoolFull"
)

// NodeGetVolumeHealth reports what this node can see without asking a sandbox: whether the data is there, whether the pool
// has room for more, and whether a filesystem that was mounted for writing still takes any. It takes no lock, for the
// reasons of NodeGetVolumeStats.
func (n *node) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	v, state, err := n.look(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: n.volumeHealth(ctx, v, state)}, nil
}

// volumeHealth is what this node can see of a volume.
func (s *store) volumeHealth(ctx context.Context, v catalog.Volume, state catalog.Node) *csi.VolumeHealth {
	health := &csi.VolumeHealth{VolumeId: v.ID.String()}
	report := func(status csi.VolumeHealthErrorType, reason, message string) {
		health.HealthStatuses = append(health.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: reason, Message: message})
	}
	switch _, err := s.stat(ctx, v); {
	case errors.Is(err, errdefs.ErrDataLoss):
		report(csi.VolumeHealthErrorType_DATA_LOSS, reasonDataLost, err.Error())
	case err != nil:
		report(csi.VolumeHealthErrorType_INACCESSIBLE, reasonUnreadable, err.Error())
	}
	if space, err := s.engine.Capacity(ctx); err == nil && space.Free < fullPool {
		report(csi.VolumeHealthErrorType_DEGRADED, reasonPoolFull, "the pool has no space left; writes to the volume fail")
	}
	for _, entry := range s.filesystemHealth(v, state) {
		report(entry.GetStatus(), entry.GetReason(), entry.GetMessage())
	}
	return health
}

// NodeGetStorageHealth reports whether the pool takes what is written to it.
func (n *node) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	resp := &csi.NodeGetStorageHealthResponse{}
	report := func(status csi.StorageHealthErrorType, reason, message string) {
		resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: status, Reason: reason, Message: message})
	}
	switch space, err := n.engine.Capacity(ctx); {
	case err != nil:
		report(csi.StorageHealthErrorType_STORAGE_UNREACHABLE, reasonUnreadable, err.Error())
	case space.Free < fullPool:
		report(csi.StorageHealthErrorType_STORAGE_DEGRADED, reasonPoolFull, "pool "+string(n.pool)+" has no space left; delete what is not needed, or enlarge its filesystem")
	}
	// This fails where the pool's filesystem has been shut down, or is read-only.
	if err := n.catalog.Reserve(); err != nil && !errors.Is(err, errdefs.ErrResourceExhausted) {
		report(csi.StorageHealthErrorType_STORAGE_UNREACHABLE, reasonShutDown, err.Error())
	}
	return resp, nil
}

// filesystemHealth looks at the filesystem of a volume that is published on the host for writing. It is one filesystem,
// however many targets there are.
func (s *store) filesystemHealth(v catalog.Volume, state catalog.Node) []*csi.VolumeHealth_VolumeHealthEntry {
	for target, p := range state.Publishes {
		if p.Kind != catalog.Mount || p.State != catalog.Published || p.ReadOnly || p.Boot != s.boot {
			continue
		}
		ours, err := s.ours(v)
		if err != nil {
			return nil // the volume's own health has told
		}
		u, err := hostmount.UsageAt(target, ours)
		switch {
		case errors.Is(err, errdefs.ErrNotFound):
			return nil // it is being unpublished
		case err != nil || !answers(target):
			return []*csi.VolumeHealth_VolumeHealthEntry{{
				Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: reasonShutDown,
				Message: "the filesystem at " + target + " has stopped after an error; unpublish the volume, publish it again, and look at the kernel's log",
			}}
		case u.ReadOnly:
			return []*csi.VolumeHealth_VolumeHealthEntry{{
				Status: csi.VolumeHealthErrorType_DEGRADED, Reason: reasonReadOnly,
				Message: "the filesystem at " + target + " takes no writes any more after an error; unpublish the volume, publish it again, and look at the kernel's log",
			}}
		}
		return nil
	}
	return nil
}

// answers reports whether a directory can be read.
func answers(dir string) bool {
	d, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer d.Close()
	_, err = d.Readdirnames(1)
	return err == nil || errors.Is(err, io.EOF)
}
