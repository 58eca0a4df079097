package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
)

// imageDriver answers as a crust-csi would that has images in several states, and notes what it was asked to do.
type imageDriver struct {
	imagesv1.UnimplementedImagesServer
	prepared, deleted []string
}

func (*imageDriver) ListImages(context.Context, *imagesv1.ListImagesRequest) (*imagesv1.ListImagesResponse, error) {
	return &imagesv1.ListImagesResponse{Images: []*imagesv1.Image{
		{Name: "ubuntu", State: "downloading", Source: "download", Origin: "on-demand", Format: "qcow2", Url: "https://h/ubuntu.qcow2", DoneBytes: 128 << 20, TotalBytes: 512 << 20, Created: ago(time.Minute)},
		{Name: "debian\x1b[2J", State: "failed", Source: "download", Origin: "on-demand", Format: "raw", Url: "https://h/debian.img", Error: "the server answers 404", Created: ago(time.Hour)},
		{Name: "snapshot-1", State: "ready", Source: "export-from-volume", Origin: "snapshot", Format: "qcow2", VolumeId: "p-vol-1", SizeBytes: 1 << 30, Consistency: "filesystem", ExportPath: "/pool/images/x.qcow2", Created: ago(2 * time.Hour)},
	}}, nil
}

func (d *imageDriver) PrepareImage(_ context.Context, req *imagesv1.PrepareImageRequest) (*imagesv1.PrepareImageResponse, error) {
	d.prepared = append(d.prepared, req.GetHandle())
	return &imagesv1.PrepareImageResponse{}, nil
}

func (d *imageDriver) DeleteImage(_ context.Context, req *imagesv1.DeleteImageRequest) (*imagesv1.DeleteImageResponse, error) {
	if req.GetName() == "snapshot-1" {
		return nil, errors.Join(errors.New("image snapshot-1 is a snapshot"), errdefs.ErrFailedPrecondition)
	}
	d.deleted = append(d.deleted, req.GetName())
	return &imagesv1.DeleteImageResponse{}, nil
}

func TestImagesCommands(t *testing.T) {
	d := &imageDriver{}
	endpoint := serveAt(t, "csi.sock", func(server *grpc.Server) { imagesv1.RegisterImagesServer(server, d) })
	ask := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := newCommand(&options{now: func() time.Time { return now }})
		cmd.SetOut(&out)
		cmd.SetErr(io.Discard)
		cmd.SilenceUsage = true
		cmd.SetArgs(append(args, "--driver-endpoint", endpoint))
		err := cmd.ExecuteContext(t.Context())
		return out.String(), err
	}
	list, err := ask("images")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"128Mi of 512Mi (25%)", "the server answers 404", `debian\x1b[2J`, "https://h/ubuntu.qcow2", "p-vol-1", "120m"} {
		if !strings.Contains(list, want) {
			t.Errorf("%q is missing in\n%s", want, list)
		}
	}
	if strings.Contains(list, "/pool/images") {
		t.Error("the narrow list is wide")
	}
	if wide, err := ask("images", "-o", "wide"); err != nil || !strings.Contains(wide, "/pool/images/x.qcow2") || !strings.Contains(wide, "filesystem") {
		t.Errorf("%v in\n%s", err, wide)
	}
	const handle = "bi://backing?backingImage=a&backingImageDataSourceType=download&url=https%3A%2F%2Fh%2F"
	if out, err := ask("images", "prepare", handle); err != nil || out != "" || len(d.prepared) != 1 || d.prepared[0] != handle {
		t.Errorf("%q, %v, %q", out, err, d.prepared)
	}
	if out, err := ask("images", "delete", "ubuntu"); err != nil || out != "" || len(d.deleted) != 1 || d.deleted[0] != "ubuntu" {
		t.Errorf("%q, %v, %q", out, err, d.deleted)
	}
	if _, err := ask("images", "delete", "snapshot-1"); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "is a snapshot") {
		t.Errorf("got %v", err)
	}
	for _, args := range [][]string{{"images", "prepare"}, {"images", "delete"}, {"images", "delete", "a", "b"}} {
		if _, err := ask(args...); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
}
