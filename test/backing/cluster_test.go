package backing

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/api/resource"

	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
	"crust.dev/crust/test/node"
	"crust.dev/crust/test/node/nodetest"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

const fsType = "ext4"

// cluster is a node, and the sidecars' view of its driver.
type cluster struct {
	*node.Node
	t    *testing.T
	bin  string
	conn *grpc.ClientConn
	// handles are the snapshot handles of VolumeSnapshots that are ready.
	handles map[string]string
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	priv.Root(t)
	vm.Need(t)
	n, bin := nodetest.New(t, "crustd", "crust-csi", "crust-agent", "crust-sandbox", "crustctl")
	n.Accel = string(vm.Accel(t))
	kep := "unix://" + n.Path("kep.sock")
	n.DriverArgs = []string{"--crustd-endpoint", kep, "--pool-size", "4Gi", "--image-allow-cidr", "127.0.0.0/8"}
	n.DaemonArgs = []string{"--kep-endpoint", kep}
	c := &cluster{Node: n, t: t, bin: bin, handles: map[string]string{}}
	_, err := n.BuildImage(c.ctx())
	must(t, err, n.StartServices(c.ctx()))
	c.conn = nodetest.Dial(t, n)
	return c
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) ctx() context.Context { return nodetest.Context(c.t) }

func (c *cluster) controller() csi.ControllerClient { return csi.NewControllerClient(c.conn) }

// provision does what the provisioner does for a claim, in the namespace "default", with its flag --extra-create-metadata.
func (c *cluster) provision(m manifests, pvc object) *node.Volume {
	c.t.Helper()
	name := "pvc-" + pvc.Metadata.Name // its uid, in a cluster
	size := resource.MustParse(pvc.Spec.Resources.Requests.Storage)
	req := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size.Value()},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
		}},
		Parameters: map[string]string{
			"csi.storage.k8s.io/pvc/name": pvc.Metadata.Name, "csi.storage.k8s.io/pvc/namespace": "default", "csi.storage.k8s.io/pv/name": name,
		},
	}
	for key, value := range m.find(c.t, "StorageClass", "crust").Parameters {
		req.Parameters[key] = value
	}
	if source := pvc.Spec.DataSource.Name; source != "" {
		handle := c.handles[source]
		if handle == "" {
			c.t.Fatalf("VolumeSnapshot %s is not ready", source)
		}
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: handle}}}
	}
	for {
		resp, err := c.controller().CreateVolume(c.ctx(), req)
		if code := status.Code(err); code == codes.Aborted || code == codes.Unavailable || code == codes.DeadlineExceeded {
			continue // in the background (external-provisioner, checkError)
		}
		must(c.t, err)
		got := resp.GetVolume()
		if req.VolumeContentSource != nil && got.GetContentSource() == nil {
			c.t.Fatal("volume content source missing") // the provisioner deletes such a volume
		}
		v := c.Volume(name, fsType)
		v.ID, v.Size, v.Context = got.GetVolumeId(), got.GetCapacityBytes(), got.GetVolumeContext()
		return v
	}
}

// snapshot does what the snapshot controller and its sidecar do for a VolumeSnapshot: cut one of a claim's volume, or look
// whether the one of a content is ready.
func (c *cluster) snapshot(m manifests, o object, volumes map[string]*node.Volume) {
	c.t.Helper()
	name := o.Metadata.Name
	if content := o.Spec.Source.Content; content != "" {
		handle := m.find(c.t, "VolumeSnapshotContent", content).Spec.Source.Handle
		resp, err := c.controller().ListSnapshots(c.ctx(), &csi.ListSnapshotsRequest{SnapshotId: handle})
		must(c.t, err)
		if len(resp.GetEntries()) != 1 || !resp.GetEntries()[0].GetSnapshot().GetReadyToUse() {
			c.t.Fatalf("VolumeSnapshot %s never becomes ready: %v", name, resp)
		}
		c.handles[name] = handle
		return
	}
	parameters := map[string]string{
		"csi.storage.k8s.io/volumesnapshot/name": name, "csi.storage.k8s.io/volumesnapshot/namespace": "default", "csi.storage.k8s.io/volumesnapshotcontent/name": "snapcontent-" + name,
	}
	for key, value := range m.find(c.t, "VolumeSnapshotClass", o.Spec.Class).Parameters {
		parameters[key] = value
	}
	for ; ; time.Sleep(20 * time.Millisecond) {
		resp, err := c.controller().CreateSnapshot(c.ctx(), &csi.CreateSnapshotRequest{
			Name: "snapshot-" + name, SourceVolumeId: volumes[o.Spec.Source.PVC].ID, Parameters: parameters,
		})
		if status.Code(err) == codes.Aborted {
			continue
		}
		must(c.t, err)
		c.handles[name] = resp.GetSnapshot().GetSnapshotId()
		if resp.GetSnapshot().GetReadyToUse() {
			return
		}
	}
}

// image is what the driver says of an image.
func (c *cluster) image(name string) *imagesv1.Image {
	c.t.Helper()
	resp, err := imagesv1.NewImagesClient(c.conn).ListImages(c.ctx(), &imagesv1.ListImagesRequest{})
	must(c.t, err)
	for _, img := range resp.GetImages() {
		if img.GetName() == name {
			return img
		}
	}
	return nil
}

// prepare runs crustctl images prepare, and waits until the list says that the image is ready.
func (c *cluster) prepare(name, handle string) {
	c.t.Helper()
	c.crustctl("images", "prepare", handle)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		switch img := c.image(name); {
		case img.GetState() == "ready":
			return
		case img.GetState() == "failed" || time.Now().After(deadline):
			c.t.Fatalf("image %s: %v", name, img)
		}
	}
}

func (c *cluster) crustctl(args ...string) string {
	c.t.Helper()
	out, err := exec.Command(filepath.Join(c.bin, "crustctl"), append(args, "--driver-endpoint", "unix://"+c.Path("csi.sock"))...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("crustctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func (c *cluster) deleteSnapshot(name string) {
	c.t.Helper()
	_, err := c.controller().DeleteSnapshot(c.ctx(), &csi.DeleteSnapshotRequest{SnapshotId: c.handles[name]})
	must(c.t, err)
}

func (c *cluster) published(v *node.Volume) node.Mount {
	c.t.Helper()
	must(c.t, v.Stage(c.ctx()), v.Publish(c.ctx(), "pod-"+v.Name))
	return node.Mount{Source: v.Target(), Destination: "/mnt/" + v.Name}
}

func (c *cluster) sh(s *node.Sandbox, script string) string {
	c.t.Helper()
	out, err := s.Sh(c.ctx(), script)
	must(c.t, err)
	return strings.TrimSpace(out)
}
