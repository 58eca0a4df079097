package csiplugin_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/protocol/csi/deferred"
)

func TestNewRefusesWhatCannotWork(t *testing.T) {
	good := csiplugin.Config{
		Endpoint: "unix:///run/csi.sock", NodeID: "n", PoolDir: "/pool", Mode: csiplugin.ModeAll,
		DriverName: "csi.crust.dev", Version: "1", Log: slog.New(slog.DiscardHandler),
	}
	if _, err := csiplugin.New(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*csiplugin.Config){
		"no endpoint":              func(c *csiplugin.Config) { c.Endpoint = "" },
		"a relative endpoint":      func(c *csiplugin.Config) { c.Endpoint = "unix://run/csi.sock" },
		"no node id":               func(c *csiplugin.Config) { c.NodeID = "" },
		"a very long node id":      func(c *csiplugin.Config) { c.NodeID = strings.Repeat("n", 257) },
		"no pool":                  func(c *csiplugin.Config) { c.PoolDir = "" },
		"a relative pool":          func(c *csiplugin.Config) { c.PoolDir = "pool" },
		"a pool with ..":           func(c *csiplugin.Config) { c.PoolDir = "/a/../b" },
		"a pool size for no xfs":   func(c *csiplugin.Config) { c.PoolSize = 1 << 20 },
		"a negative pool size":     func(c *csiplugin.Config) { c.PoolSize = -1 },
		"an unknown mode":          func(c *csiplugin.Config) { c.Mode = "both" },
		"no driver name":           func(c *csiplugin.Config) { c.DriverName = "" },
		"an upper case name":       func(c *csiplugin.Config) { c.DriverName = "CSI" },
		"a name with an empty dot": func(c *csiplugin.Config) { c.DriverName = "a..b" },
		"a very long name":         func(c *csiplugin.Config) { c.DriverName = strings.Repeat("a", 64) },
		"no version":               func(c *csiplugin.Config) { c.Version = "" },
		"no log":                   func(c *csiplugin.Config) { c.Log = nil },
	} {
		t.Run(name, func(t *testing.T) {
			bad := good
			change(&bad)
			if _, err := csiplugin.New(bad); !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestIdentity(t *testing.T) {
	h := newHost(t, "xfs")
	info, err := h.identity.GetPluginInfo(h.call(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != csiplugin.DefaultDriverName || info.GetVendorVersion() != "test" {
		t.Errorf("got %v, %v", info, err)
	}
	probe, err := h.identity.Probe(h.call(), &csi.ProbeRequest{})
	if err != nil || !probe.GetReady().GetValue() {
		t.Errorf("got %v, %v", probe, err)
	}
	node, err := h.node.NodeGetInfo(h.call(), &csi.NodeGetInfoRequest{})
	if err != nil || node.GetNodeId() != "node-1" || node.GetAccessibleTopology().GetSegments()["csi.crust.dev/pool"] != h.poolID() {
		t.Errorf("got %v, %v", node, err)
	}
}

// TestCapabilitiesAreKept holds what is advertised against what is implemented: a call that belongs to a capability is
// answered, if only with a complaint, and one that belongs to none is not implemented.
func TestCapabilitiesAreKept(t *testing.T) {
	h := newHost(t, "xfs")
	c, err := h.control.ControllerGetCapabilities(h.call(), &csi.ControllerGetCapabilitiesRequest{})
	must(t, err)
	g, err := csi.NewGroupControllerClient(h.conn).GroupControllerGetCapabilities(h.call(), &csi.GroupControllerGetCapabilitiesRequest{})
	must(t, err)
	plain, err := h.node.NodeGetCapabilities(h.call(), &csi.NodeGetCapabilitiesRequest{})
	must(t, err)
	for _, c := range plain.GetCapabilities() {
		if _, known := csi.NodeServiceCapability_RPC_Type_name[int32(c.GetRpc().GetType())]; !known {
			t.Errorf("a CO that did not ask for the extension is shown %v", c)
		}
	}
	n, err := h.node.NodeGetCapabilities(deferred.Ask(h.call()), &csi.NodeGetCapabilitiesRequest{})
	must(t, err)
	has := map[string]bool{}
	for _, c := range c.GetCapabilities() {
		has["controller "+c.GetRpc().GetType().String()] = true
	}
	for _, n := range n.GetCapabilities() {
		has["node "+n.GetRpc().GetType().String()] = true
	}
	for _, g := range g.GetCapabilities() {
		has["group "+g.GetRpc().GetType().String()] = true
	}
	code := func(_ any, err error) error { return err }
	ctx := h.call()
	for name, call := range map[string]struct {
		capability string
		err        error
	}{
		"CreateVolume":           {"controller CREATE_DELETE_VOLUME", code(h.control.CreateVolume(ctx, &csi.CreateVolumeRequest{}))},
		"DeleteVolume":           {"controller CREATE_DELETE_VOLUME", code(h.control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{}))},
		"ControllerPublish":      {"controller PUBLISH_UNPUBLISH_VOLUME", code(h.control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{}))},
		"ListVolumes":            {"controller LIST_VOLUMES", code(h.control.ListVolumes(ctx, &csi.ListVolumesRequest{}))},
		"GetCapacity":            {"controller GET_CAPACITY", code(h.control.GetCapacity(ctx, &csi.GetCapacityRequest{}))},
		"CreateSnapshot":         {"controller CREATE_DELETE_SNAPSHOT", code(h.control.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{}))},
		"ListSnapshots":          {"controller LIST_SNAPSHOTS", code(h.control.ListSnapshots(ctx, &csi.ListSnapshotsRequest{}))},
		"ControllerExpandVolume": {"controller EXPAND_VOLUME", code(h.control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{}))},
		"ControllerModifyVolume": {"controller MODIFY_VOLUME", code(h.control.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{}))},
		"GetSnapshot":            {"controller GET_SNAPSHOT", code(h.control.GetSnapshot(ctx, &csi.GetSnapshotRequest{}))},
		"DeleteSnapshot":         {"controller CREATE_DELETE_SNAPSHOT", code(h.control.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: ""}))},
		"ControllerGetVolume":    {"controller GET_VOLUME", code(h.control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{}))},
		"GetVolumeHealth":        {"controller GET_VOLUME_HEALTH", code(h.control.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{}))},
		"ListVolumeHealth":       {"controller LIST_VOLUME_HEALTH", code(h.control.ControllerListVolumeHealth(ctx, &csi.ControllerListVolumeHealthRequest{}))},
		"CreateGroup":            {"group CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", code(csi.NewGroupControllerClient(h.conn).CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{}))},
		"DeleteGroup":            {"group CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", code(csi.NewGroupControllerClient(h.conn).DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{}))},
		"GetGroup":               {"group CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", code(csi.NewGroupControllerClient(h.conn).GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{}))},
		"NodeStageVolume":        {"node STAGE_UNSTAGE_VOLUME", code(h.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{}))},
		"NodeUnstageVolume":      {"node STAGE_UNSTAGE_VOLUME", code(h.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{}))},
		"NodeGetVolumeStats":     {"node GET_VOLUME_STATS", code(h.node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{}))},
		"NodeExpandVolume":       {"node EXPAND_VOLUME", code(h.node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{}))},
		"NodeGetVolumeHealth":    {"node GET_VOLUME_HEALTH", code(h.node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{}))},
		"NodeGetStorageHealth":   {"node GET_STORAGE_HEALTH", code(h.node.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{}))},
	} {
		t.Run(name, func(t *testing.T) {
			if has[call.capability] {
				if call.err != nil {
					wantCode(t, call.err, codes.InvalidArgument)
				}
				return
			}
			wantCode(t, call.err, codes.Unimplemented)
		})
	}
	for _, want := range []csi.NodeServiceCapability_RPC_Type{
		deferred.CapabilityDeferFSOps, deferred.CapabilitySupplementalGroup, deferred.CapabilitySupplementalGroupChangePolicy,
		csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP, csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		if !has["node "+want.String()] {
			t.Errorf("capability %v is missing", want)
		}
	}
}

func TestModesServeTheirServicesOnly(t *testing.T) {
	for mode, want := range map[csiplugin.Mode]struct{ controller, node codes.Code }{
		csiplugin.ModeController: {codes.OK, codes.Unimplemented},
		csiplugin.ModeNode:       {codes.Unimplemented, codes.OK},
	} {
		t.Run(string(mode), func(t *testing.T) {
			h := newHost(t, "xfs")
			h.stop()
			h.cfg.Mode = mode
			h.start()
			_, err := h.control.ControllerGetCapabilities(h.call(), &csi.ControllerGetCapabilitiesRequest{})
			wantCode(t, err, want.controller)
			_, err = h.node.NodeGetCapabilities(h.call(), &csi.NodeGetCapabilitiesRequest{})
			wantCode(t, err, want.node)
		})
	}
}
