package crust_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/internal/sptest"
)

func TestPassThrough(t *testing.T) {
	n := newNode(t)
	t.Run("methods that the daemon does not know", func(t *testing.T) {
		info, err := csi.NewIdentityClient(n.conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
		if err != nil || info.GetName() != sptest.Name {
			t.Errorf("GetPluginInfo: %v, %v", info, err)
		}
		id, err := n.csi().NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		if err != nil || id.GetNodeId() != "node" {
			t.Errorf("NodeGetInfo: %v, %v", id, err)
		}
	})
	t.Run("unknown fields and metadata", func(t *testing.T) {
		req := &csi.GetCapacityRequest{}
		unknown := []byte{0xf8, 0x07, 0x2a}
		req.ProtoReflect().SetUnknown(unknown)
		ctx := metadata.AppendToOutgoingContext(t.Context(), "x-request", "7")
		resp, err := csi.NewControllerClient(n.conn).GetCapacity(ctx, req)
		if err != nil || resp.GetAvailableCapacity() != 42 || string(resp.ProtoReflect().GetUnknown()) != string(unknown) {
			t.Errorf("GetCapacity: %v, %v", resp, err)
		}
	})
	t.Run("an error with its details", func(t *testing.T) {
		_, err := csi.NewControllerClient(n.conn).GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"fail": "x"}})
		st := status.Convert(err)
		if st.Code() != codes.ResourceExhausted || st.Message() != "full" || len(st.Details()) != 1 {
			t.Errorf("GetCapacity: %v %q %v", st.Code(), st.Message(), st.Details())
		}
	})
	t.Run("a method that the driver lacks", func(t *testing.T) {
		_, err := csi.NewControllerClient(n.conn).ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("ListVolumes: %v", err)
		}
	})
	t.Run("a method that nobody has", func(t *testing.T) {
		err := n.conn.Invoke(t.Context(), "/csi.v9.Node/Future", &csi.ProbeRequest{}, &csi.ProbeResponse{}, grpc.WaitForReady(true))
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("Future: %v", err)
		}
	})
	t.Run("a volume that is not deferred", func(t *testing.T) {
		n.driver.Volume(t, "plain", 1<<20)
		target := n.target("plain")
		req := publishRequest("plain", target)
		req.VolumeContext = nil
		if _, err := n.csi().NodePublishVolume(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(target); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the daemon has made the target path: %v", err)
		}
		stats, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "plain", VolumePath: target})
		if err != nil || stats.GetUsage()[0].GetTotal() != 4711 {
			t.Errorf("stats: %v, %v", stats, err)
		}
		if err := n.unpublish("plain", target); err != nil {
			t.Error(err)
		}
		if ext := n.driver.Unpublished(); len(ext) != 1 || ext[0].GetDeferFsOps() {
			t.Errorf("unpublish requests: %v", ext)
		}
	})
}

func TestCapabilitiesOfTheDriverThatAreForTheDaemon(t *testing.T) {
	n := newNode(t)
	resp, err := n.csi().NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []csi.NodeServiceCapability_RPC_Type
	for _, c := range resp.GetCapabilities() {
		got = append(got, c.GetRpc().GetType())
	}
	if diff := cmp.Diff(n.driver.Capabilities[:3], got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

func TestNewRefuses(t *testing.T) {
	good := newNode(t).config
	for name, change := range map[string]func(*crust.Config){
		"endpoint":           func(c *crust.Config) { c.Drivers[0].Endpoint = "tcp://1" },
		"driver endpoint":    func(c *crust.Config) { c.Drivers[0].Upstream = "" },
		"runtime endpoint":   func(c *crust.Config) { c.RuntimeEndpoint = "x" },
		"KEP endpoint":       func(c *crust.Config) { c.KEPEndpoint = "x" },
		"is used twice":      func(c *crust.Config) { c.Drivers[0].Endpoint = c.Drivers[0].Upstream },
		"no driver":          func(c *crust.Config) { c.Drivers = nil },
		"state directory":    func(c *crust.Config) { c.StateDir = "state" },
		"device root":        func(c *crust.Config) { c.DeviceRoots = []string{"/dev/../x"} },
		"a logger is needed": func(c *crust.Config) { c.Log = nil },
		"default handler":    func(c *crust.Config) { c.DefaultHandler = "none" },
	} {
		config := good
		config.Drivers = slices.Clone(good.Drivers)
		change(&config)
		_, err := crust.New(config)
		if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
