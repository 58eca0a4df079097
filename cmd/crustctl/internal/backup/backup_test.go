package backup_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"crust.dev/crust/cmd/crustctl/internal/backup"
)

// driver answers with ranges, and fails once for each of breaks, after so many messages.
type driver struct {
	csi.UnimplementedSnapshotMetadataServer
	capacity int64
	ranges   []backup.Range
	breaks   []int
	code     codes.Code
	offsets  []int64
}

func (d *driver) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	d.offsets = append(d.offsets, req.GetStartingOffset())
	after := -1
	if len(d.breaks) > 0 {
		after, d.breaks = d.breaks[0], d.breaks[1:]
	}
	for _, r := range d.ranges {
		if r.Offset < req.GetStartingOffset() {
			continue
		}
		if after--; after == -1 {
			return status.Error(d.code, "broken")
		}
		if err := stream.Send(&csi.GetMetadataDeltaResponse{VolumeCapacityBytes: d.capacity, BlockMetadata: []*csi.BlockMetadata{{ByteOffset: r.Offset, SizeBytes: r.Size}}}); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) client(t *testing.T) csi.SnapshotMetadataClient {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	csi.RegisterSnapshotMetadataServer(server, d)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("passthrough:", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return csi.NewSnapshotMetadataClient(conn)
}

var three = []backup.Range{{Offset: 0, Size: 4096}, {Offset: 8192, Size: 4096}, {Offset: 12288, Size: 4096}}

func TestAskTakesABrokenStreamUpAgain(t *testing.T) {
	d := &driver{capacity: 16384, ranges: three, breaks: []int{1, 1}, code: codes.Unavailable}
	m, err := backup.Ask(t.Context(), d.client(t), "target", "base", 0)
	if diff := cmp.Diff(three, m.Ranges); err != nil || diff != "" || m.Total != 12288 || m.Count != 3 {
		t.Errorf("%v, %+v (-want +got):\n%s", err, m, diff)
	}
	if diff := cmp.Diff([]int64{0, 4096, 12288}, d.offsets); diff != "" {
		t.Errorf("offsets (-want +got):\n%s", diff)
	}
}

func TestAskGivesUp(t *testing.T) {
	for name, c := range map[string]struct {
		driver *driver
		want   error
	}{
		"nothing gets through":       {&driver{capacity: 16384, ranges: three, breaks: []int{0}, code: codes.Unavailable}, errdefs.ErrUnavailable},
		"another error":              {&driver{capacity: 16384, ranges: three, breaks: []int{2}, code: codes.FailedPrecondition}, errdefs.ErrFailedPrecondition},
		"overlapping ranges":         {&driver{capacity: 16384, ranges: []backup.Range{{0, 8192}, {4096, 8192}}}, errdefs.ErrDataLoss},
		"beyond the volume":          {&driver{capacity: 16384, ranges: []backup.Range{{12288, 8192}}}, errdefs.ErrDataLoss},
		"an empty range":             {&driver{capacity: 16384, ranges: []backup.Range{{4096, 0}}}, errdefs.ErrDataLoss},
		"an overflowing range":       {&driver{capacity: 16384, ranges: []backup.Range{{4096, 1<<63 - 1}}}, errdefs.ErrDataLoss},
		"a method that is not there": {&driver{}, errdefs.ErrNotImplemented},
	} {
		t.Run(name, func(t *testing.T) {
			base := "base"
			if c.want == errdefs.ErrNotImplemented {
				base = ""
			}
			if m, err := backup.Ask(t.Context(), c.driver.client(t), "target", base, 0); !errors.Is(err, c.want) {
				t.Errorf("got %+v, %v", m, err)
			}
		})
	}
}

// fixture writes a file that has a letter in each of its blocks, or zeros for a blank.
func fixture(t *testing.T, dir, name, letters string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	var content []byte
	for _, letter := range []byte(letters) {
		if letter == ' ' {
			letter = 0
		}
		content = append(content, bytes.Repeat([]byte{letter}, 4096)...)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestImage(t *testing.T) {
	dir := t.TempDir()
	base, source, missed := fixture(t, dir, "base", "ab d"), fixture(t, dir, "source", "aB  e "), fixture(t, dir, "missed", "aBc e ")
	m := backup.Metadata{Snapshot: "target", Base: "base", Capacity: 5 * 4096, Ranges: []backup.Range{{4096, 4096}, {3 * 4096, 2 * 4096}}}
	image := backup.Image{Path: filepath.Join(dir, "image"), Base: base, Source: source}
	if err := image.Write(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(image.Path)
	want, _ := os.ReadFile(source)
	if err != nil || !bytes.Equal(got, want[:5*4096]) {
		t.Errorf("the image is another, %v", err)
	}
	for name, c := range map[string]struct {
		image backup.Image
		want  error
	}{
		"a change was missed":     {backup.Image{Path: filepath.Join(dir, "new"), Base: base, Source: missed}, errdefs.ErrDataLoss},
		"it is there":             {image, errdefs.ErrAlreadyExists},
		"changes without a base":  {backup.Image{Path: filepath.Join(dir, "new"), Source: source}, errdefs.ErrInvalidArgument},
		"the source is too small": {backup.Image{Path: filepath.Join(dir, "new"), Base: base, Source: base}, errdefs.ErrInvalidArgument},
		"there is no source":      {backup.Image{Path: filepath.Join(dir, "new"), Base: base, Source: filepath.Join(dir, "none")}, os.ErrNotExist},
		"there is no base":        {backup.Image{Path: filepath.Join(dir, "new"), Base: filepath.Join(dir, "none"), Source: source}, os.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.image.Write(t.Context(), m); !errors.Is(err, c.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("the driver has not said how large the volume is", func(t *testing.T) {
		image := backup.Image{Path: filepath.Join(dir, "new"), Base: base, Source: source}
		if err := image.Write(t.Context(), backup.Metadata{Snapshot: "target", Base: "base"}); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("got %v", err)
		}
	})
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (backup.Image{Path: filepath.Join(dir, "new"), Base: base, Source: source}).Write(cancelled, m); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 4 {
		t.Errorf("left are %v, %v", left, err)
	}
}
