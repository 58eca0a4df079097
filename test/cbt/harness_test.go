package cbt

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/api"
	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"google.golang.org/grpc"

	"crust.dev/crust/test/node"
	"crust.dev/crust/test/node/nodetest"
)

const (
	mib   = 1 << 20
	block = 4096
)

// bench is a node whose driver is asked for changed blocks.
type bench struct {
	*node.Node
	testing.TB
	bin  string
	conn *grpc.ClientConn
}

// newBench builds commands and starts the driver; commands are further ones.
func newBench(t testing.TB, commands ...string) *bench {
	t.Helper()
	n, bin := nodetest.New(t, append(commands, "crust-csi")...)
	n.DriverArgs = []string{"--pool-size", "4Gi"}
	return &bench{Node: n, TB: t, bin: bin}
}

func (b *bench) dial() {
	b.Helper()
	b.conn = nodetest.Dial(b, b.Node)
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func (b *bench) ctx() context.Context { return nodetest.Context(b) }

// volume creates a volume, empty or from a snapshot; of size 0, it is as large as that.
func (b *bench) volume(name, fsType, snapshot string, size int64) *node.Volume {
	b.Helper()
	v := b.Volume(name, fsType)
	req := &csi.CreateVolumeRequest{
		Name:              name,
		Parameters:        map[string]string{"crust.dev/defer": "always"},
		MutableParameters: map[string]string{"crust.dev/discard": "online"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
		}},
	}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	if snapshot != "" {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot}}}
	}
	resp, err := csi.NewControllerClient(b.conn).CreateVolume(b.ctx(), req)
	must(b, err)
	v.ID, v.Size, v.Context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetCapacityBytes(), resp.GetVolume().GetVolumeContext()
	return v
}

func (b *bench) snapshot(name, volume string) string {
	b.Helper()
	resp, err := csi.NewControllerClient(b.conn).CreateSnapshot(b.ctx(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume})
	must(b, err)
	return resp.GetSnapshot().GetSnapshotId()
}

// file is where the data of a volume is.
func (b *bench) file(v *node.Volume) string {
	b.Helper()
	found, err := filepath.Glob(b.Path("pool", "*", "objects", v.ID))
	if len(found) == 0 && err == nil {
		found, err = filepath.Glob(b.Path("pool", "objects", v.ID))
	}
	if err != nil || len(found) != 1 {
		b.Fatalf("the data of %s is at %v, %v", v.ID, found, err)
	}
	return found[0]
}

// records receives a stream as external-snapshot-metadata's client gives it to its emitters.
func records(ctx context.Context, conn *grpc.ClientConn, base, target string, emit iterator.IteratorEmitter) error {
	client := csi.NewSnapshotMetadataClient(conn)
	type message interface {
		GetBlockMetadataType() csi.BlockMetadataType
		GetVolumeCapacityBytes() int64
		GetBlockMetadata() []*csi.BlockMetadata
	}
	var recv func() (message, error)
	if base == "" {
		stream, err := client.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: target})
		if err != nil {
			return err
		}
		recv = func() (message, error) { return stream.Recv() }
	} else {
		stream, err := client.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: target})
		if err != nil {
			return err
		}
		recv = func() (message, error) { return stream.Recv() }
	}
	for n := 1; ; n++ {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return emit.SnapshotMetadataIteratorDone(n - 1)
		}
		if err != nil {
			return err
		}
		record := iterator.IteratorMetadata{BlockMetadataType: api.BlockMetadataType(m.GetBlockMetadataType()), VolumeCapacityBytes: m.GetVolumeCapacityBytes()}
		for _, r := range m.GetBlockMetadata() {
			record.BlockMetadata = append(record.BlockMetadata, &api.BlockMetadata{ByteOffset: r.GetByteOffset(), SizeBytes: r.GetSizeBytes()})
		}
		if err := emit.SnapshotMetadataIteratorRecord(n, record); err != nil {
			return err
		}
	}
}

// counter counts blocks that are reported, those of them that do not differ, and those that had data and have none any more,
// before it passes them on.
type counter struct {
	iterator.IteratorEmitter
	source, target           *os.File
	blocks, needless, zeroed int64
}

func (c *counter) SnapshotMetadataIteratorRecord(n int, m iterator.IteratorMetadata) error {
	a, b := make([]byte, block), make([]byte, block)
	for _, r := range m.BlockMetadata {
		for offset := r.ByteOffset; offset < r.ByteOffset+r.SizeBytes; offset += block {
			if _, err := c.source.ReadAt(a, offset); err != nil {
				return err
			}
			if _, err := c.target.ReadAt(b, offset); err != nil {
				return err
			}
			c.blocks++
			switch {
			case bytes.Equal(a, b):
				c.needless++
			case bytes.Equal(a, make([]byte, block)):
				c.zeroed++
			}
		}
	}
	return c.IteratorEmitter.SnapshotMetadataIteratorRecord(n, m)
}

// verify has the verifier apply the answer for two snapshots, or for one if base is empty, to restored volumes. It returns
// what was counted.
func (b *bench) verify(fsType, base, target string, size int64) *counter {
	b.Helper()
	name := fmt.Sprintf("%.6s-%.6s", base[max(0, len(base)-6):], target[len(target)-6:])
	source, sink := b.volume("source-"+name, fsType, target, size), b.volume("sink-"+name, fsType, base, size)
	from, err := os.Open(b.file(source))
	must(b, err)
	defer from.Close()
	to, err := os.OpenFile(b.file(sink), os.O_RDWR, 0)
	must(b, err)
	defer to.Close()
	c := &counter{source: from, target: to, IteratorEmitter: &iterator.VerifierEmitter{SourceDevice: from, TargetDevice: to}}
	if err := records(b.ctx(), b.conn, base, target, c); err != nil {
		b.Errorf("%s since %q: %v", target, base, err)
	}
	b.Logf("%s since %q: %d of %d blocks are reported, %d of them needlessly, %d have no data any more; the verifier agrees", target, base, c.blocks, source.Size/block, c.needless, c.zeroed)
	must(b, from.Close(), to.Close(), source.Delete(b.ctx()), sink.Delete(b.ctx()))
	return c
}
