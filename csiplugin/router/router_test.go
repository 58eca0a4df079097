package router_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"crust.dev/crust/csiplugin/internal/routing"
	"crust.dev/crust/test/halt"
)

const mib = 1 << 20

func TestCallsReachTheNodeThatHasThePool(t *testing.T) {
	c := newCluster(t)
	for _, m := range c.members {
		volume := m.create(t, "v")
		resp, err := c.control.ControllerExpandVolume(t.Context(), grown(volume, 128*mib))
		if err != nil || resp.GetCapacityBytes() != 128*mib || !resp.GetNodeExpansionRequired() {
			t.Errorf("expansion on %s: %v, %v", m.name, resp, err)
		}
		want, err := m.control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: volume})
		must(t, err)
		got, err := c.control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: volume})
		if err != nil || !proto.Equal(got, want) || want.GetVolume().GetCapacityBytes() != 128*mib {
			t.Errorf("the router says %v, %v, %s itself %v", got, err, m.name, want)
		}
		_, err = c.control.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: volume, MutableParameters: map[string]string{"crust.dev/discard": "online"}})
		must(t, err)
		_, err = c.control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: volume})
		must(t, err)
	}
	t.Run("streams are those of the node", c.streamsAreThose)
	t.Run("errors are those of the node", c.errorsAreThose)
	t.Run("snapshots are those of the node", c.snapshotsAreThose)
	t.Run("group snapshots are those of the node", c.groupsAreThose)
	t.Run("errors about snapshots are those of the node", c.snapshotErrorsAreThose)
	t.Run("images of a pool", c.imagesOfAPool)
	t.Run("images of no pool", c.imagesOfNoPool)
	t.Run("snapshots out of reach", c.snapshotsOutOfReach)
	t.Run("a volume of nobody", c.nobodysVolume)
	t.Run("a label that is out of date", c.staleLabel)
	t.Run("what is not routed says where it is served", c.notRouted)
	t.Run("it is a plugin to a sidecar", c.isAPlugin)
	t.Run("the kubelet asks whether it is well", c.probed)
	t.Run("a caller that goes away ends the node's call", c.cancelled)
	t.Run("what a node says", c.asIfTheNodeWereCalled)
	t.Run("nobody else gets into a node", c.strangers)
	t.Run("a node that hangs", c.hangs)
	t.Run("a node that is down", c.down)
	t.Run("certificates are changed", c.rotation)
}

func (c *cluster) streamsAreThose(t *testing.T) {
	for _, m := range c.members {
		volume := m.create(t, "streams")
		m.write(t, volume, mib, 2*mib)
		base := m.snapshot(t, "base", volume)
		m.write(t, volume, 8*mib, 3*mib)
		target := m.snapshot(t, "target", volume)
		allocated, delta := &csi.GetMetadataAllocatedRequest{SnapshotId: target, MaxResults: 7}, &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: target, StartingOffset: 9 * mib, MaxResults: 7}
		for name, open := range map[string]func(csi.SnapshotMetadataClient) ([]proto.Message, error){
			"allocated": func(client csi.SnapshotMetadataClient) ([]proto.Message, error) {
				s, err := client.GetMetadataAllocated(t.Context(), allocated)
				must(t, err)
				return all(func() (proto.Message, error) { return s.Recv() })
			},
			"delta": func(client csi.SnapshotMetadataClient) ([]proto.Message, error) {
				s, err := client.GetMetadataDelta(t.Context(), delta)
				must(t, err)
				return all(func() (proto.Message, error) { return s.Recv() })
			},
		} {
			want, err := open(m.metadata)
			must(t, err)
			got, err := open(c.metadata)
			must(t, err)
			if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" || len(want) < 50 {
				t.Errorf("%s of %s, %d messages:\n%s", name, m.name, len(want), diff)
			}
		}
	}
}

func (c *cluster) errorsAreThose(t *testing.T) {
	m := c.members[1]
	volume := m.create(t, "errors")
	for name, call := range map[string]func(csi.ControllerClient, csi.SnapshotMetadataClient) error{
		"a size that cannot be": func(client csi.ControllerClient, _ csi.SnapshotMetadataClient) error {
			_, err := client.ControllerExpandVolume(t.Context(), grown(volume, 1<<60))
			return err
		},
		"a volume that is gone": func(client csi.ControllerClient, _ csi.SnapshotMetadataClient) error {
			_, err := client.ControllerExpandVolume(t.Context(), grown(volume[:len(volume)-4]+"0000", mib))
			return err
		},
		"a parameter that is not known": func(client csi.ControllerClient, _ csi.SnapshotMetadataClient) error {
			_, err := client.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: volume, MutableParameters: map[string]string{"x": "y"}})
			return err
		},
		"no id": func(client csi.ControllerClient, _ csi.SnapshotMetadataClient) error {
			_, err := client.ControllerExpandVolume(t.Context(), grown("", mib))
			return err
		},
		"no id of ours": func(client csi.ControllerClient, _ csi.SnapshotMetadataClient) error {
			_, err := client.ControllerExpandVolume(t.Context(), grown("pvc-1", mib))
			return err
		},
		"a snapshot that is gone": func(_ csi.ControllerClient, client csi.SnapshotMetadataClient) error {
			s, err := client.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: m.pool + "-snap-" + strings.Repeat("0", 32)})
			must(t, err)
			_, err = s.Recv()
			return err
		},
		"an offset beyond the end": func(_ csi.ControllerClient, client csi.SnapshotMetadataClient) error {
			s, err := client.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: m.snapshot(t, "errors", volume), StartingOffset: 1 << 40})
			must(t, err)
			_, err = s.Recv()
			return err
		},
	} {
		want, got := status.Convert(call(m.control, m.metadata)), status.Convert(call(c.control, c.metadata))
		if want.Code() == codes.OK || !proto.Equal(want.Proto(), got.Proto()) {
			t.Errorf("%s: the router says %v, the node %v", name, got, want)
		}
	}
	s, err := c.metadata.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{
		BaseSnapshotId: c.members[0].pool + "-snap-" + strings.Repeat("0", 32), TargetSnapshotId: c.members[1].pool + "-snap-" + strings.Repeat("0", 32),
	})
	must(t, err)
	_, err = s.Recv()
	wantCode(t, err, codes.InvalidArgument, "one volume", c.members[0].pool, c.members[1].pool)
}

func (c *cluster) nobodysVolume(t *testing.T) {
	_, err := c.control.ControllerExpandVolume(t.Context(), grown("0123456789ab-vol-"+strings.Repeat("0", 32), mib))
	wantCode(t, err, codes.Unavailable, "0123456789ab", label, "disk")
	s, err := c.metadata.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: "0123456789ab-snap-" + strings.Repeat("0", 32)})
	must(t, err)
	_, err = s.Recv()
	wantCode(t, err, codes.Unavailable, "0123456789ab")
}

// staleLabel is about a disk that has moved: neither the node that had it nor the one that has it is to say "not found".
func (c *cluster) staleLabel(t *testing.T) {
	had, other := c.members[0], c.members[1]
	volume := had.create(t, "moved")
	snapshot := had.snapshot(t, "moved", volume)
	c.api.put(had.name, other.address, had.pool)
	defer c.api.put(had.name, had.address, had.pool)
	_, err := c.control.ControllerExpandVolume(t.Context(), grown(volume, 128*mib))
	wantCode(t, err, codes.Unavailable, had.pool, other.pool, "label")
	s, err := c.metadata.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot})
	must(t, err)
	_, err = s.Recv()
	wantCode(t, err, codes.Unavailable, had.pool, other.pool, "label")
	c.api.put("node-3", had.address, had.pool)
	_, err = c.control.ControllerExpandVolume(t.Context(), grown(volume, 128*mib))
	wantCode(t, err, codes.Unavailable, had.name, "node-3", "kubectl label")
	c.api.remove("node-3")
	c.api.put(had.name, had.address, had.pool)
	_, err = c.control.ControllerExpandVolume(t.Context(), grown(volume, 128*mib))
	must(t, err)
}

func (c *cluster) notRouted(t *testing.T) {
	calls := map[string]func(grpc.ClientConnInterface) error{
		"CreateVolume": func(conn grpc.ClientConnInterface) error {
			_, err := csi.NewControllerClient(conn).CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: []*csi.VolumeCapability{capability}})
			return err
		},
		"DeleteVolume": func(conn grpc.ClientConnInterface) error {
			_, err := csi.NewControllerClient(conn).DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: c.members[0].pool})
			return err
		},
		"ListVolumes": func(conn grpc.ClientConnInterface) error {
			_, err := csi.NewControllerClient(conn).ListVolumes(t.Context(), &csi.ListVolumesRequest{})
			return err
		},
		"ControllerListVolumeHealth": func(conn grpc.ClientConnInterface) error {
			_, err := csi.NewControllerClient(conn).ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
			return err
		},
		"NodePublishVolume": func(conn grpc.ClientConnInterface) error {
			_, err := csi.NewNodeClient(conn).NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: c.members[0].pool})
			return err
		},
	}
	for name, call := range calls {
		wantCode(t, call(c.router.conn), codes.Unimplemented, name, "node")
	}
	// A node refuses the same even to the router.
	conn := c.dialNode(t, c.credentials(t, c.certs), c.members[0].pool)
	for name, call := range calls {
		if err := call(conn); status.Code(err) != codes.Unimplemented {
			t.Errorf("%s on a node's port for the router: %v", name, err)
		}
	}
}

func (c *cluster) isAPlugin(t *testing.T) {
	client := csi.NewIdentityClient(c.router.conn)
	info, err := client.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "csi.crust.dev" || info.GetVendorVersion() == "" {
		t.Errorf("it is %v, %v", info, err)
	}
	ready, err := client.Probe(t.Context(), &csi.ProbeRequest{})
	if err != nil || !ready.GetReady().GetValue() {
		t.Errorf("it is %v, %v", ready, err)
	}
	caps, err := client.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
	must(t, err)
	services := map[csi.PluginCapability_Service_Type]bool{}
	for _, c := range caps.GetCapabilities() {
		services[c.GetService().GetType()] = true
	}
	if !services[csi.PluginCapability_Service_CONTROLLER_SERVICE] || !services[csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE] || !services[csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE] {
		t.Errorf("it has %v", caps)
	}
	control, err := c.control.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	must(t, err)
	var got []string
	for _, c := range control.GetCapabilities() {
		got = append(got, c.GetRpc().GetType().String())
	}
	groups, err := c.groups.GroupControllerGetCapabilities(t.Context(), &csi.GroupControllerGetCapabilitiesRequest{})
	must(t, err)
	want, err := c.members[0].groups.GroupControllerGetCapabilities(t.Context(), &csi.GroupControllerGetCapabilitiesRequest{})
	if err != nil || !proto.Equal(groups, want) {
		t.Errorf("of groups it can %v, a node %v, %v", groups, want, err)
	}
	if want := "EXPAND_VOLUME MODIFY_VOLUME GET_VOLUME GET_VOLUME_HEALTH CREATE_DELETE_SNAPSHOT LIST_SNAPSHOTS GET_SNAPSHOT SINGLE_NODE_MULTI_WRITER"; strings.Join(got, " ") != want {
		t.Errorf("it can %v", got)
	}
}

// cancelled opens a stream of more than fits on the way, and reads no further: the node waits, and has the snapshot held as long as
// the caller is there.
func (c *cluster) cancelled(t *testing.T) {
	m := c.members[0]
	volume := m.create(t, "cancelled")
	_, err := c.control.ControllerExpandVolume(t.Context(), grown(volume, 256*mib))
	must(t, err)
	m.write(t, volume, 0, 256*mib)
	snapshot := m.snapshot(t, "cancelled", volume)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.metadata.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot, MaxResults: 1})
	must(t, err)
	_, err = s.Recv()
	must(t, err)
	remove := func() error {
		_, err := m.control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		return err
	}
	for range 20 {
		wantCode(t, remove(), codes.Aborted)
		time.Sleep(50 * time.Millisecond)
	}
	cancel()
	for deadline := time.Now().Add(20 * time.Second); remove() != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the node's call goes on: %v", remove())
		}
	}
	_, err = all(s.Recv)
	wantCode(t, err, codes.Canceled)
}

// credentials are those of somebody who shows the certificate of a directory, and believes its authority.
func (c *cluster) credentials(t *testing.T, dir string) credentials.TransportCredentials {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	must(t, err)
	// Whom a stranger believes is the stranger's matter.
	return credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}, InsecureSkipVerify: true})
}

// dialNode connects to the first node and means a pool, unless that is empty.
func (c *cluster) dialNode(t *testing.T, creds credentials.TransportCredentials, pool string) *grpc.ClientConn {
	t.Helper()
	opts := []grpc.DialOption{grpc.WithTransportCredentials(creds), grpc.WithNoProxy()}
	if pool != "" {
		opts = append(opts, routing.Means(pool)...)
	}
	conn, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(c.members[0].address, fmt.Sprint(c.port)), opts...)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (c *cluster) strangers(t *testing.T) {
	volume := c.members[0].create(t, "strangers")
	for name, row := range map[string]struct {
		creds credentials.TransportCredentials
		code  codes.Code
	}{
		"the router":                             {c.credentials(t, c.certs), codes.OK},
		"another node":                           {c.credentials(t, c.members[1].certs), codes.Unavailable},
		"a router of another authority":          {c.credentials(t, newAuthority(t).issue(t.TempDir(), "router.csi.crust.dev")), codes.Unavailable},
		"a router of another driver":             {c.credentials(t, c.ca.issue(t.TempDir(), "router.other.example.com")), codes.Unavailable},
		"somebody without a certificate":         {credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}), codes.Unavailable},
		"somebody who speaks in the clear":       {insecure.NewCredentials(), codes.Unavailable},
		"the router, in an older version of TLS": {credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}), codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := csi.NewControllerClient(c.dialNode(t, row.creds, c.members[0].pool)).ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: volume})
			wantCode(t, err, row.code)
		})
	}
}

func (c *cluster) hangs(t *testing.T) {
	m := c.members[1]
	volume := m.create(t, "hangs")
	snapshot := m.snapshot(t, "hangs before", volume)
	defer halt.Process(t, m.cmd.Process.Pid)()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := c.control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: volume})
	wantCode(t, err, codes.DeadlineExceeded)
	c.snapshotsWhileItHangs(t, volume, snapshot)
	_, err = c.control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: c.members[0].create(t, "answers")})
	must(t, err)
}

// eventually calls until that succeeds, as a sidecar does.
func eventually(t *testing.T, call func() error) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		err := call()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func (c *cluster) down(t *testing.T) {
	m := c.members[0]
	volume := m.create(t, "down")
	m.write(t, volume, 0, 64*mib)
	snapshot := m.snapshot(t, "down", volume)
	s, err := c.metadata.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot, MaxResults: 1})
	must(t, err)
	_, err = s.Recv()
	must(t, err)
	m.stop(syscall.SIGKILL)
	_, err = all(s.Recv)
	wantCode(t, err, codes.Unavailable, m.pool, m.name)
	expand := func() error {
		_, err := c.control.ControllerExpandVolume(t.Context(), grown(volume, 128*mib))
		return err
	}
	wantCode(t, expand(), codes.Unavailable, m.pool, m.name, m.address, "--route-listen")
	m.run()
	eventually(t, expand)
}

// rotation replaces all certificates, one side after the other, and restarts nothing but the node, whose connection would otherwise
// live for some minutes.
func (c *cluster) rotation(t *testing.T) {
	m := c.members[0]
	volume := m.create(t, "rotation")
	get := func() error {
		_, err := c.control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: volume})
		return err
	}
	must(t, get())
	next := newAuthority(t)
	next.issue(m.certs, "node.csi.crust.dev")
	must(t, get())
	m.stop(syscall.SIGTERM)
	m.run()
	wantCode(t, get(), codes.Unavailable, m.name, "certificate")
	next.issue(c.certs, "router.csi.crust.dev")
	eventually(t, get)
	next.issue(m.certs, "router.csi.crust.dev")
	m.stop(syscall.SIGTERM)
	m.run()
	wantCode(t, get(), codes.Unavailable, m.name, "certificate")
}
