package router_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// member is a node of the cluster.
type member struct {
	*process
	name, address, pool, dir, certs string
	clients
}

// clients are those of one end: a node's, or the router's.
type clients struct {
	control  csi.ControllerClient
	groups   csi.GroupControllerClient
	metadata csi.SnapshotMetadataClient
}

func clientsOf(p *process) clients {
	return clients{csi.NewControllerClient(p.conn), csi.NewGroupControllerClient(p.conn), csi.NewSnapshotMetadataClient(p.conn)}
}

// cluster is two nodes with a pool each, and a router.
type cluster struct {
	t       *testing.T
	bin     string
	ca      *authority
	api     *apiServer
	members []*member
	port    int
	router  *process
	certs   string
	clients
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	priv.Root(t)
	c := &cluster{t: t, bin: crustCSI(t), ca: newAuthority(t), api: newAPIServer(t), port: freePort(t)}
	for i := range 2 {
		m := &member{name: fmt.Sprintf("node-%d", i+1), address: fmt.Sprintf("127.0.0.%d", i+1), certs: c.ca.issue(t.TempDir(), "node.csi.crust.dev")}
		m.dir = filepath.Join(scratch.Filesystem(t, "xfs", 1<<30), "pool")
		m.process = start(t, c.bin, append(fileFlags(m.certs), "--node-id", m.name, "--pool", m.dir, "--snapshot-metadata-block-size", "4Ki",
			"--image-allow-cidr", "127.0.0.0/8",
			"--route-listen", net.JoinHostPort(m.address, fmt.Sprint(c.port)))...)
		m.clients = clientsOf(m.process)
		info, err := csi.NewNodeClient(m.conn).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		must(t, err)
		m.pool = info.GetAccessibleTopology().GetSegments()[label]
		c.api.put(m.name, m.address, m.pool) // as the kubelet does
		c.members = append(c.members, m)
	}
	c.certs = c.ca.issue(t.TempDir(), "router.csi.crust.dev")
	c.router = start(t, c.bin, append(fileFlags(c.certs), "--mode=router", "--route-port", fmt.Sprint(c.port), "--kubeconfig", c.api.kubeconfig(t))...)
	c.clients = clientsOf(c.router)
	return c
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

var capability = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
}

// create makes a volume of 64 MiB.
func (m *member) create(t *testing.T, name string) string {
	t.Helper()
	resp, err := m.control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 * mib}, VolumeCapabilities: []*csi.VolumeCapability{capability},
	})
	must(t, err)
	return resp.GetVolume().GetVolumeId()
}

// write fills so many bytes at an offset of a volume.
func (m *member) write(t *testing.T, volume string, offset, n int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(m.dir, "objects", volume), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte(strings.Repeat("x", int(n))), offset)
	must(t, err, f.Sync(), f.Close())
}

func (m *member) snapshot(t *testing.T, name, volume string) string {
	t.Helper()
	resp, err := m.control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume})
	must(t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

func grown(volume string, size int64) *csi.ControllerExpandVolumeRequest {
	return &csi.ControllerExpandVolumeRequest{VolumeId: volume, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: capability}
}

// all reads a stream.
func all[M any](recv func() (M, error)) (list []M, err error) {
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		list = append(list, m)
	}
}

func wantCode(t *testing.T, err error, want codes.Code, texts ...string) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("got %v, want %v", err, want)
	}
	for _, text := range texts {
		if !strings.Contains(fmt.Sprint(err), text) {
			t.Errorf("%v does not mention %q", err, text)
		}
	}
}
