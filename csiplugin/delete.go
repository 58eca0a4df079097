package csiplugin

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// DeleteVolume removes a volume and its data. A volume that does not exist is success; one of another pool is
// ErrFailedPrecondition, because it may well exist there. A volume in use is ErrFailedPrecondition and stays as it is.
func (c *controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	v, release, err := c.enter(ctx, req.GetVolumeId())
	if errors.Is(err, errdefs.ErrNotFound) {
		return &csi.DeleteVolumeResponse{}, gone(err)
	}
	if err != nil {
		return nil, err
	}
	defer release()
	if err := c.unused(ctx, v); err != nil {
		return nil, err
	}
	v.State = catalog.Deleting
	if err := c.catalog.PutVolume(v); err != nil {
		return nil, err
	}
	crashpoint.At(ctx, "deletion intended")
	if err := c.remove(ctx, v); err != nil {
		return nil, err
	}
	c.freeBases(ctx, v.ID)
	return &csi.DeleteVolumeResponse{}, nil
}

// unused returns nil if a volume is neither staged nor published nor open. Records from before a reboot do not count.
func (s *store) unused(ctx context.Context, v catalog.Volume) error {
	n, err := s.catalog.Node(v.ID)
	if err != nil {
		return err
	}
	if targets := s.liveTargets(n); len(targets) > 0 {
		return precondition("volume %s is published at %s; unpublish it first", v.ID, strings.Join(targets, ", "))
	}
	if n.Staged != nil && n.Staged.Boot == s.boot {
		return precondition("volume %s is staged at %s; unstage it first", v.ID, n.Staged.Path)
	}
	err = s.engine.Idle(ctx, object(v.ID))
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil // there is nothing left that could be in use
	}
	return err
}

// liveTargets are the target paths of publishes that are in effect, or may be.
func (s *store) liveTargets(n catalog.Node) []string {
	var targets []string
	for target, p := range n.Publishes {
		if p.Boot == s.boot {
			targets = append(targets, target)
		}
	}
	slices.Sort(targets)
	return targets
}

// remove removes a volume whose record says Creating or Deleting.
func (s *store) remove(ctx context.Context, v catalog.Volume) error {
	if err := s.engine.Delete(ctx, object(v.ID)); err != nil {
		return err
	}
	crashpoint.At(ctx, "data deleted")
	if err := s.catalog.RemoveVolume(v.ID); err != nil {
		return err
	}
	crashpoint.At(ctx, "deletion recorded")
	return nil
}
