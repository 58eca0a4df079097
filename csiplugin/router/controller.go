package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"crust.dev/crust/csiplugin/handle"
)

// controller is the Controller service, as far as central sidecars need it.
type controller struct {
	csi.UnimplementedControllerServer
	*Router
}

// ControllerGetCapabilities is what is passed on. How access modes are told apart is the nodes' way, too.
func (c *controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

func (c *controller) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return forward(ctx, c.Router, req, csi.ControllerClient.ControllerExpandVolume)
}

func (c *controller) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	return forward(ctx, c.Router, req, csi.ControllerClient.ControllerModifyVolume)
}

func (c *controller) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return forward(ctx, c.Router, req, csi.ControllerClient.ControllerGetVolume)
}

func (c *controller) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return forward(ctx, c.Router, req, csi.ControllerClient.ControllerGetVolumeHealth)
}

// forward calls a method of the node that has the request's volume.
func forward[Req interface{ GetVolumeId() string }, Resp any](ctx context.Context, r *Router, req Req,
	method func(csi.ControllerClient, context.Context, Req, ...grpc.CallOption) (Resp, error)) (Resp, error) {
	var none Resp
	id, err := handle.ParseVolume(req.GetVolumeId())
	if err != nil {
		return none, err
	}
	l, err := r.link(ctx, id.Pool())
	if err != nil {
		return none, err
	}
	var trailer metadata.MD
	resp, err := method(csi.NewControllerClient(l.conn), ctx, req, grpc.Trailer(&trailer))
	return resp, l.fault(ctx, err, trailer)
}
