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

// ControllerGetCapabilities is what is passed on. How access modes are told apart is the nodes' way, too. LIST_SNAPSHOTS is there for
// csi-snapshotter, which takes a snapshot for ready, whatever it is, if it cannot ask by ListSnapshots; ListSnapshots without an id is
// not served.
func (c *controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

func (c *controller) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return forwardVolume(ctx, c.Router, req, csi.ControllerClient.ControllerExpandVolume)
}

func (c *controller) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	return forwardVolume(ctx, c.Router, req, csi.ControllerClient.ControllerModifyVolume)
}

func (c *controller) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return forwardVolume(ctx, c.Router, req, csi.ControllerClient.ControllerGetVolume)
}

func (c *controller) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return forwardVolume(ctx, c.Router, req, csi.ControllerClient.ControllerGetVolumeHealth)
}

// forwardVolume calls a method of the node that has the request's volume.
func forwardVolume[Req interface{ GetVolumeId() string }, Resp any](ctx context.Context, r *Router, req Req, method method[csi.ControllerClient, Req, Resp]) (resp Resp, err error) {
	id, err := handle.ParseVolume(req.GetVolumeId())
	if err != nil {
		return resp, err
	}
	return forward(ctx, r, id.Pool(), req, csi.NewControllerClient, method)
}

// method is one of a client's.
type method[Client, Req, Resp any] = func(Client, context.Context, Req, ...grpc.CallOption) (Resp, error)

// forward calls a method of the node that has a pool.
func forward[Client, Req, Resp any](ctx context.Context, r *Router, pool handle.Pool, req Req, client func(grpc.ClientConnInterface) Client, method method[Client, Req, Resp]) (resp Resp, err error) {
	l, err := r.link(ctx, pool)
	if err != nil {
		return resp, err
	}
	var trailer metadata.MD
	resp, err = method(client(l.conn), ctx, req, grpc.Trailer(&trailer))
	return resp, l.fault(ctx, err, trailer)
}
