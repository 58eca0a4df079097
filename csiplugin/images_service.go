package csiplugin

import (
	"context"

	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/images"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	imagesv1 "crust.dev/crust/protocol/crust/images/v1"
)

// imageService is the Images service.
type imageService struct {
	imagesv1.UnsafeImagesServer
	images *images.Store
}

// ListImages is that of the API.
func (s *imageService) ListImages(context.Context, *imagesv1.ListImagesRequest) (*imagesv1.ListImagesResponse, error) {
	list, err := s.images.List()
	if err != nil {
		return nil, err
	}
	resp := &imagesv1.ListImagesResponse{}
	for _, st := range list {
		resp.Images = append(resp.Images, s.described(st))
	}
	return resp, nil
}

func (s *imageService) described(st images.Status) *imagesv1.Image {
	d := &imagesv1.Image{
		Name: st.Name, Id: st.ID.String(), State: string(st.State), Source: string(st.Source), Origin: string(st.Origin),
		Format: string(st.Format), Url: st.URL, SizeBytes: st.Size, FileBytes: st.FileSize, Checksum: st.Checksum,
		ExportPath: s.images.ExportPath(st.Image), Consistency: st.Consistency, Handle: st.Handle, Created: timestamppb.New(st.Created),
	}
	if st.Volume != (handle.Volume{}) {
		d.VolumeId = st.Volume.String()
	}
	switch {
	case st.Progress != nil:
		d.State, d.DoneBytes, d.TotalBytes = string(st.Progress.Phase), st.Progress.Done, st.Progress.Total
	case st.Fault != nil && st.State != catalog.Ready:
		d.State, d.Error = "failed", st.Fault.Error()
	}
	return d
}

// PrepareImage is that of the API.
func (s *imageService) PrepareImage(ctx context.Context, req *imagesv1.PrepareImageRequest) (*imagesv1.PrepareImageResponse, error) {
	h, err := backing.ParseHandle(req.GetHandle())
	if err != nil {
		return nil, err
	}
	if err := s.images.Prepare(ctx, h); err != nil {
		return nil, err
	}
	return &imagesv1.PrepareImageResponse{}, nil
}

// DeleteImage is that of the API.
func (s *imageService) DeleteImage(ctx context.Context, req *imagesv1.DeleteImageRequest) (*imagesv1.DeleteImageResponse, error) {
	if err := checkName(req.GetName()); err != nil {
		return nil, err
	}
	if err := s.images.Remove(ctx, req.GetName()); err != nil {
		return nil, err
	}
	return &imagesv1.DeleteImageResponse{}, nil
}
