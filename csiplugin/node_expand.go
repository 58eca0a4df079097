package csiplugin

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/protocol/csi/deferred"
)

// NodeExpandVolume lets this node see a volume's size after ControllerExpandVolume, which is the only one to change it: a
// larger required_bytes is ErrOutOfRange. A mounted filesystem grows to it, and a loop device too. A volume that is staged
// and not mounted grows when it is mounted. With defer_fs_ops there is nothing to do: the sandbox has the file itself and
// grows the filesystem.
func (n *node) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	var ext deferred.NodeExpandVolumeRequestExtension
	if err := deferred.Get(req, &ext); err != nil {
		return nil, err
	}
	if req.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	if req.GetVolumePath() == "" {
		return nil, invalid("volume_path is missing")
	}
	v, state, release, err := n.visit(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer release()
	path, err := parsePath("volume_path", req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if asked := req.GetVolumeCapability(); asked != nil {
		parsed, err := parseCapability(asked)
		if err != nil {
			return nil, err
		}
		if _, err := parsed.of(v); err != nil {
			return nil, invalid("%v", err)
		}
	}
	at, err := n.locate(v, state, path, ext.GetDeferFsOps())
	if err != nil {
		return nil, err
	}
	size, err := n.present(ctx, v, req.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	if err := n.follow(ctx, v, state, at); err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: size}, nil
}

// present returns the volume's size if it is within the range.
func (n *node) present(ctx context.Context, v catalog.Volume, r *csi.CapacityRange) (int64, error) {
	required, limit, err := parseRange(r)
	if err != nil {
		return 0, err
	}
	st, err := n.stat(ctx, v)
	switch {
	case err != nil:
		return 0, err
	case required > st.Size:
		return 0, outOfRange("capacity_range: %d bytes are required, the volume has %d; expand it with ControllerExpandVolume first", required, st.Size)
	case limit > 0 && st.Size > limit:
		return 0, outOfRange("capacity_range: limit_bytes %d; the volume has %d, and volumes do not shrink", limit, st.Size)
	}
	return st.Size, nil
}

// follow makes what is on the host as large as the volume.
func (n *node) follow(ctx context.Context, v catalog.Volume, state catalog.Node, at where) error {
	if err := loopdev.Grow(n.path(v)); err != nil {
		return err
	}
	if !at.mounted {
		return nil
	}
	// The filesystem is asked at its own mount: the one at the target may be read-only by itself.
	staging := state.Staged.Path
	ours, err := n.ours(v)
	if err != nil {
		return err
	}
	u, err := hostmount.UsageAt(staging, ours)
	if err != nil {
		return err
	}
	if u.ReadOnly {
		return precondition("volume %s is mounted read-only; its filesystem grows when it is mounted for writing", v.ID)
	}
	devices, err := loopdev.Find(n.path(v))
	if err != nil || len(devices) == 0 {
		return err
	}
	return n.blame(ctx, hostmount.Filesystem{Device: devices[0].Path, Target: staging, Type: v.FSType}.Grow(ctx))
}
