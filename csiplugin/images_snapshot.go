package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/images"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
)

// describedImage is a backing image that CreateSnapshot has made, as CSI describes it.
func (c *controller) describedImage(img catalog.Image) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId: images.Handle(img).String(), SourceVolumeId: img.Volume.String(), SizeBytes: img.Size,
		ReadyToUse: img.State == catalog.Ready, CreationTime: timestamppb.New(img.Created), AccessibleTopology: []*csi.Topology{c.topology()},
	}
}

// imageSnapshot describes what the handle of an image stands for. A handle that has an image prepared when it is used is always
// ready: whoever waits for it to become so would never use it. ErrNotFound for one that only refers to an image which does not
// exist.
func (c *controller) imageSnapshot(id string) (*csi.Snapshot, error) {
	h, err := backing.ParseHandle(id)
	if err != nil {
		return nil, err
	}
	img, err := c.images.Find(h)
	switch {
	case err == nil && img.Origin == catalog.BySnapshot && img.State == catalog.Creating:
		return nil, fmt.Errorf("image %q: %w", img.Name, errdefs.ErrNotFound) // it is not cut yet
	case err == nil && h.ID != "":
		snap := c.describedImage(img)
		snap.SnapshotId = id
		return snap, nil
	case errors.Is(err, errdefs.ErrNotFound):
		if err := h.Preparable(); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	}
	// When a snapshot was cut that is yet to be has no answer. This one at least stays the same until there is one.
	created := time.Unix(0, 0)
	if img.State == catalog.Ready || img.State == catalog.Exporting {
		created = img.Created
	}
	return &csi.Snapshot{
		SnapshotId: id, SourceVolumeId: h.Volume, SizeBytes: img.Size, ReadyToUse: true,
		CreationTime: timestamppb.New(created), AccessibleTopology: []*csi.Topology{c.topology()},
	}, nil
}

// listImage is ListSnapshots for the handle of one image.
func (c *controller) listImage(req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	snap, err := c.imageSnapshot(req.GetSnapshotId())
	if errors.Is(err, errdefs.ErrNotFound) || err == nil && req.GetSourceVolumeId() != "" && req.GetSourceVolumeId() != snap.GetSourceVolumeId() {
		return &csi.ListSnapshotsResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	return &csi.ListSnapshotsResponse{Entries: []*csi.ListSnapshotsResponse_Entry{{Snapshot: snap}}}, nil
}

// listed is an entry of ListSnapshots and what the entries are ordered by.
type listed struct {
	key  handle.Handle
	snap *csi.Snapshot
}

// imagesAfter are the backing images among the snapshots that come after a token. They come before all others, because that
// is the order of their ids.
func (c *controller) imagesAfter(page pageRequest, volume string) ([]listed, error) {
	if h, err := handle.Parse(page.after); err == nil && h.Kind() == handle.KindSnapshot {
		return nil, nil
	}
	found, err := c.catalog.ImagesAfter(page.after, func(img catalog.Image) bool {
		return img.Origin == catalog.BySnapshot && (img.State == catalog.Ready || img.State == catalog.Exporting) &&
			(volume == "" || img.Volume.String() == volume)
	}, page.ask())
	var list []listed
	for _, img := range found {
		list = append(list, listed{img.ID.Handle, c.describedImage(img)})
	}
	return list, err
}

// deleteImage is DeleteSnapshot for the handle of an image.
func (c *controller) deleteImage(ctx context.Context, id string) error {
	h, err := backing.ParseHandle(id)
	if err != nil {
		return err
	}
	return c.images.Delete(ctx, h)
}
