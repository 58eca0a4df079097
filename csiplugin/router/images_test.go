package router_test

import (
	"bytes"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin/backing/backingtest"
	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
)

// download is the handle of an image that is downloaded on demand.
func download(name, from string) string {
	return "bi://backing?backingImageDataSourceType=download&backingImage=" + name + "&url=" + url.QueryEscape(from)
}

// exported is the handle of an image that is exported on demand.
func exported(name, volume string) string {
	return "bi://backing?backingImageDataSourceType=export-from-volume&backingImage=" + name + "&volume-name=" + volume + "&export-type=raw"
}

// images are the names of a node's images.
func (m *member) images(t *testing.T) (names []string) {
	t.Helper()
	list, err := imagesv1.NewImagesClient(m.conn).ListImages(t.Context(), &imagesv1.ListImagesRequest{})
	must(t, err)
	for _, img := range list.GetImages() {
		names = append(names, img.GetName())
	}
	slices.Sort(names)
	return names
}

// use makes a volume from an image, which is prepared on demand.
func (m *member) use(t *testing.T, name, image string) {
	t.Helper()
	eventually(t, func() error {
		_, err := m.control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 * mib}, VolumeCapabilities: []*csi.VolumeCapability{capability},
			VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: image}}},
		})
		return err
	})
}

// has checks which images a node has.
func (m *member) has(t *testing.T, want ...string) {
	t.Helper()
	if got := m.images(t); !slices.Equal(got, want) {
		t.Errorf("%s has the images %v, want %v", m.name, got, want)
	}
}

// imagesOfAPool are those whose handle says which pool they are in.
func (c *cluster) imagesOfAPool(t *testing.T) {
	for _, m := range c.members {
		volume := m.create(t, "images")
		made, err := c.control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "golden", SourceVolumeId: volume, Parameters: map[string]string{"type": "bi"}})
		must(t, err)
		demanded := exported("demanded", volume)
		m.use(t, "from the export", demanded)
		m.has(t, "demanded", "golden")
		for _, id := range []string{made.GetSnapshot().GetSnapshotId(), demanded} {
			c.sameAs(t, m, id, getSnapshot(t, id))
			list, err := c.sameAs(t, m, id, listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: id}))
			must(t, err)
			if entries := list.(*csi.ListSnapshotsResponse).GetEntries(); len(entries) != 1 || !entries[0].GetSnapshot().GetReadyToUse() || entries[0].GetSnapshot().GetSizeBytes() != 64*mib {
				t.Errorf("%s is %v", id, entries)
			}
			for range 2 {
				_, err := deleteSnapshot(t, id)(c.clients)
				must(t, err)
			}
		}
		m.has(t)
		c.sameAs(t, m, "an image that is gone", getSnapshot(t, made.GetSnapshot().GetSnapshotId()))
	}
}

// imagesOfNoPool are made by any node.
func (c *cluster) imagesOfNoPool(t *testing.T) {
	server := backingtest.Serve(t, backingtest.File(bytes.Repeat([]byte("image"), mib)))
	image, operators := download("shared", server.URL+"/a"), download("operators", server.URL+"/b")
	a, b := c.members[0], c.members[1]
	a.use(t, "first", image)
	b.use(t, "first", image)
	_, err := imagesv1.NewImagesClient(a.conn).PrepareImage(t.Context(), &imagesv1.PrepareImageRequest{Handle: operators})
	must(t, err)
	a.has(t, "operators", "shared")
	b.has(t, "shared")

	got, err := c.control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: image})
	must(t, err)
	list, err := c.control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: image})
	must(t, err)
	if s := got.GetSnapshot(); !s.GetReadyToUse() || s.GetSnapshotId() != image || s.GetCreationTime() == nil || len(list.GetEntries()) != 1 || !list.GetEntries()[0].GetSnapshot().GetReadyToUse() {
		t.Errorf("the image is %v, listed as %v", s, list)
	}
	// A node that has not made it yet says the same, but for its topology.
	ofNode, err := a.control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: download("unmade", server.URL)})
	must(t, err)
	unmade, err := c.control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: download("unmade", server.URL)})
	must(t, err)
	ofNode.Snapshot.AccessibleTopology = nil
	if ofNode.String() != unmade.String() {
		t.Errorf("the router says %v, the node %v", unmade, ofNode)
	}
	list, err = c.control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: image, SourceVolumeId: "pvc-1"})
	if err != nil || len(list.GetEntries()) != 0 {
		t.Errorf("of another volume there is %v, %v", list, err)
	}
	reference := strings.TrimSuffix(image, image[strings.Index(image, "&url="):])
	for _, do := range []call{getSnapshot(t, reference), listSnapshots(t, &csi.ListSnapshotsRequest{SnapshotId: reference})} {
		_, err := do(c.clients)
		wantCode(t, err, codes.InvalidArgument, "shared", "url", "image-id")
	}

	_, err = deleteSnapshot(t, reference)(c.clients) // it was made for another handle
	must(t, err)
	a.has(t, "operators", "shared")
	c.deletedUnlessRefused(t, image, a)
	c.deletedByAll(t, image, a, b)
	_, err = deleteSnapshot(t, operators)(c.clients)
	must(t, err)
	a.has(t, "operators")
	_, err = imagesv1.NewImagesClient(a.conn).DeleteImage(t.Context(), &imagesv1.DeleteImageRequest{Name: "operators"})
	must(t, err)

	// By a volume's name, only its node can make it, and nobody knows which that is.
	volume := b.create(t, "by-name")
	b.write(t, volume, 0, mib)
	byName := exported("by-name", "by-name")
	b.use(t, "from by-name", byName)
	b.has(t, "by-name")
	_, err = deleteSnapshot(t, byName)(c.clients)
	must(t, err)
	b.has(t)
}

// deletedUnlessRefused deletes an image that somebody has open on one node.
func (c *cluster) deletedUnlessRefused(t *testing.T, image string, m *member) {
	t.Helper()
	list, err := imagesv1.NewImagesClient(m.conn).ListImages(t.Context(), &imagesv1.ListImagesRequest{})
	must(t, err)
	for _, img := range list.GetImages() {
		if img.GetName() == "shared" {
			f, err := os.Open(filepath.Join(m.dir, "objects", img.GetId()))
			must(t, err)
			_, err = deleteSnapshot(t, image)(c.clients)
			wantCode(t, err, codes.FailedPrecondition, m.name, m.pool)
			must(t, f.Close())
			m.has(t, "operators", "shared")
			return
		}
	}
	t.Error("there is no image")
}

// deletedByAll deletes an image while one node after the other does not answer: it is gone when all have.
func (c *cluster) deletedByAll(t *testing.T, image string, a, b *member) {
	t.Helper()
	remove := func() error {
		_, err := deleteSnapshot(t, image)(c.clients)
		return err
	}
	b.use(t, "again", image)
	b.stop(syscall.SIGKILL)
	err := remove()
	wantCode(t, err, codes.Unavailable, b.name, b.pool, "1 of 2 nodes", "Node object")
	if strings.Contains(fmt.Sprint(err), server(image)) {
		t.Errorf("the error shows where the image is from: %v", err)
	}
	a.has(t, "operators") // whoever answers need not wait for who does not
	b.run()
	eventually(t, remove)
	b.has(t)
	must(t, remove())

	// The label of a node that has another pool now: the one that has the pool was not told.
	c.api.put(b.name, a.address, b.pool)
	wantCode(t, remove(), codes.Unavailable, a.pool, b.pool, "label")
	c.api.put(b.name, b.address, b.pool)
	// A label that no crust-csi has given.
	c.api.put("node-3", a.address, "elsewhere")
	wantCode(t, remove(), codes.Unavailable, "node-3", "kubectl label")
	c.api.remove("node-3")
	must(t, remove())
}

// server is the host of a handle's URL, escaped as it is there.
func server(image string) string {
	_, after, _ := strings.Cut(image, "&url=")
	return after
}
