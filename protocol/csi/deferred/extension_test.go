package deferred_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"

	"crust.dev/crust/protocol/csi/deferred"
)

// node is an SP written against upstream CSI alone, or one that answers with the extension.
type node struct {
	csi.UnimplementedNodeServer
	got      *csi.NodePublishVolumeRequest
	response *csi.NodePublishVolumeResponse
}

func (n *node) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	n.got = proto.CloneOf(req)
	return n.response, nil
}

func dial(t *testing.T, n *node) csi.NodeClient {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterNodeServer(server, n)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return csi.NewNodeClient(conn)
}

func publishRequest() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId:   "v",
		TargetPath: "/target",
		VolumeCapability: &csi.VolumeCapability{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4", VolumeMountGroup: "7"}},
		},
	}
}

func answer() *deferred.DeferredFilesystem {
	return &deferred.DeferredFilesystem{
		Device: "/pool/v.img", FsType: "ext4", MountFlags: []string{"noatime"}, SizeBytes: 1 << 28,
		FormatPolicy: deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK, NeverWritten: true,
		SupplementalGroup: "7", SupplementalGroupChangePolicy: deferred.GroupChangeOnRootMismatch,
	}
}

func TestExtensionTravels(t *testing.T) {
	n := &node{response: &csi.NodePublishVolumeResponse{}}
	if err := deferred.Set(n.response, &deferred.NodePublishVolumeResponseExtension{DeferredFilesystem: answer()}); err != nil {
		t.Fatal(err)
	}
	req := publishRequest()
	if err := deferred.Set(req, &deferred.NodePublishVolumeRequestExtension{DeferFsOps: true}); err != nil {
		t.Fatal(err)
	}
	group := &deferred.MountVolumeExtension{VolumeSupplementalGroup: "7", VolumeSupplementalGroupChangePolicy: "Always"}
	if err := deferred.Set(req.GetVolumeCapability().GetMount(), group); err != nil {
		t.Fatal(err)
	}
	resp, err := dial(t, n).NodePublishVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}

	var gotReq deferred.NodePublishVolumeRequestExtension
	if err := deferred.Get(n.got, &gotReq); err != nil || !gotReq.GetDeferFsOps() {
		t.Errorf("the SP saw defer_fs_ops %v, %v", gotReq.GetDeferFsOps(), err)
	}
	var gotGroup deferred.MountVolumeExtension
	if err := deferred.Get(n.got.GetVolumeCapability().GetMount(), &gotGroup); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(group, &gotGroup, protocmp.Transform()); diff != "" {
		t.Errorf("the SP saw another group:\n%s", diff)
	}
	var gotResp deferred.NodePublishVolumeResponseExtension
	if err := deferred.Get(resp, &gotResp); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(answer(), gotResp.GetDeferredFilesystem(), protocmp.Transform()); diff != "" {
		t.Errorf("the CO saw another filesystem:\n%s", diff)
	}
}

func TestUpstreamPeersInteroperate(t *testing.T) {
	t.Run("an SP that knows nothing of it reads the request as before", func(t *testing.T) {
		n := &node{response: &csi.NodePublishVolumeResponse{}}
		req := publishRequest()
		if err := deferred.Set(req, &deferred.NodePublishVolumeRequestExtension{DeferFsOps: true}); err != nil {
			t.Fatal(err)
		}
		resp, err := dial(t, n).NodePublishVolume(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		n.got.ProtoReflect().SetUnknown(nil)
		if diff := cmp.Diff(publishRequest(), n.got, protocmp.Transform()); diff != "" {
			t.Errorf("the known fields differ:\n%s", diff)
		}
		var ext deferred.NodePublishVolumeResponseExtension
		if err := deferred.Get(resp, &ext); err != nil || ext.GetDeferredFilesystem() != nil {
			t.Errorf("its answer reads as %v, %v, want no deferred filesystem", &ext, err)
		}
	})
	t.Run("a CO that knows nothing of it reads the answer as before", func(t *testing.T) {
		n := &node{response: &csi.NodePublishVolumeResponse{}}
		if err := deferred.Set(n.response, &deferred.NodePublishVolumeResponseExtension{DeferredFilesystem: answer()}); err != nil {
			t.Fatal(err)
		}
		resp, err := dial(t, n).NodePublishVolume(t.Context(), publishRequest())
		if err != nil {
			t.Fatal(err)
		}
		resp.ProtoReflect().SetUnknown(nil)
		if diff := cmp.Diff(&csi.NodePublishVolumeResponse{}, resp, protocmp.Transform()); diff != "" {
			t.Error(diff)
		}
		var ext deferred.NodePublishVolumeRequestExtension
		if err := deferred.Get(n.got, &ext); err != nil || ext.GetDeferFsOps() {
			t.Errorf("its request reads as %v, %v, want no deferral", &ext, err)
		}
	})
}

func TestSet(t *testing.T) {
	t.Run("replaces its own fields and keeps those of others", func(t *testing.T) {
		req := &csi.NodeUnpublishVolumeRequest{}
		stranger := []byte{0xf8, 0x07, 0x01} // field 127, a varint
		req.ProtoReflect().SetUnknown(stranger)
		for _, never := range []bool{true, false} {
			if err := deferred.Set(req, &deferred.NodeUnpublishVolumeRequestExtension{DeferFsOps: true, NeverMounted: never}); err != nil {
				t.Fatal(err)
			}
		}
		var ext deferred.NodeUnpublishVolumeRequestExtension
		if err := deferred.Get(req, &ext); err != nil || !ext.GetDeferFsOps() || ext.GetNeverMounted() {
			t.Errorf("got %v, %v", &ext, err)
		}
		if got := req.ProtoReflect().GetUnknown(); string(got[:3]) != string(stranger) {
			t.Errorf("the other field is gone: %x", got)
		}
	})
	t.Run("refuses the extension of another message", func(t *testing.T) {
		err := deferred.Set(&csi.NodeExpandVolumeRequest{}, &deferred.NodePublishVolumeRequestExtension{})
		if !errors.Is(err, errdefs.ErrInternal) {
			t.Errorf("set: %v", err)
		}
	})
}

func TestNumbersAreFree(t *testing.T) {
	for _, msg := range []proto.Message{
		&csi.NodePublishVolumeRequest{}, &csi.NodePublishVolumeResponse{}, &csi.NodeUnpublishVolumeRequest{},
		&csi.NodeGetVolumeStatsRequest{}, &csi.NodeExpandVolumeRequest{}, &csi.VolumeCapability_MountVolume{},
	} {
		for _, n := range []int32{52601, 52602, 52603} {
			if f := msg.ProtoReflect().Descriptor().Fields().ByNumber(protoreflect.FieldNumber(n)); f != nil {
				t.Errorf("upstream uses field %d of %s for %s", n, msg.ProtoReflect().Descriptor().Name(), f.Name())
			}
		}
	}
	for _, c := range []csi.NodeServiceCapability_RPC_Type{deferred.CapabilityDeferFSOps, deferred.CapabilitySupplementalGroup, deferred.CapabilitySupplementalGroupChangePolicy} {
		if name, ok := csi.NodeServiceCapability_RPC_Type_name[int32(c)]; ok {
			t.Errorf("upstream uses capability %d for %s", c, name)
		}
	}
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*deferred.DeferredFilesystem)
		ok     bool
	}{
		{"complete", func(*deferred.DeferredFilesystem) {}, true},
		{"read-only without format", func(d *deferred.DeferredFilesystem) { d.ReadOnly, d.FormatPolicy = true, 1 }, true},
		{"no device", func(d *deferred.DeferredFilesystem) { d.Device = "" }, false},
		{"relative device", func(d *deferred.DeferredFilesystem) { d.Device = "pool/v.img" }, false},
		{"device with dots", func(d *deferred.DeferredFilesystem) { d.Device = "/pool/../etc/shadow" }, false},
		{"no filesystem type", func(d *deferred.DeferredFilesystem) { d.FsType = "" }, false},
		{"size zero", func(d *deferred.DeferredFilesystem) { d.SizeBytes = 0 }, false},
		{"negative size", func(d *deferred.DeferredFilesystem) { d.SizeBytes = -1 }, false},
		{"read-only and to be formatted", func(d *deferred.DeferredFilesystem) { d.ReadOnly = true }, false},
		{"group by name", func(d *deferred.DeferredFilesystem) { d.SupplementalGroup = "staff" }, false},
		{"group that chown ignores", func(d *deferred.DeferredFilesystem) { d.SupplementalGroup = "4294967295" }, false},
		{"policy without group", func(d *deferred.DeferredFilesystem) { d.SupplementalGroup = "" }, false},
		{"unknown policy", func(d *deferred.DeferredFilesystem) { d.SupplementalGroupChangePolicy = "Never" }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := answer()
			tc.change(d)
			err := d.Validate()
			if tc.ok && err != nil || !tc.ok && !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("validate: %v", err)
			}
		})
	}
	if err := (*deferred.DeferredFilesystem)(nil).Validate(); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("nothing at all: %v", err)
	}
}

// FuzzGet: whatever a peer sends as unknown fields, Get either fails as an invalid argument, or reads something that it
// would read again after writing it.
func FuzzGet(f *testing.F) {
	resp := &csi.NodePublishVolumeResponse{}
	if err := deferred.Set(resp, &deferred.NodePublishVolumeResponseExtension{DeferredFilesystem: answer()}); err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(resp.ProtoReflect().GetUnknown()))
	f.Add([]byte{0xf8, 0x07, 0x01})
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, raw []byte) {
		var resp csi.NodePublishVolumeResponse
		if proto.Unmarshal(raw, &resp) != nil {
			return
		}
		var ext deferred.NodePublishVolumeResponseExtension
		if err := deferred.Get(&resp, &ext); err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Fatalf("get: %v", err)
			}
			return
		}
		if err := deferred.Set(&resp, &ext); err != nil {
			t.Fatalf("set what was got: %v", err)
		}
		var again deferred.NodePublishVolumeResponseExtension
		if err := deferred.Get(&resp, &again); err != nil || !proto.Equal(&ext, &again) {
			t.Fatalf("got %v, then %v, %v", &ext, &again, err)
		}
	})
}
