package crust_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/crust"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/kata/config"
	stand "crust.dev/crust/test/kata"
)

// kataRequest is for a volume that a Kata sandbox is to mount.
func kataRequest(volume, target string) *csi.NodePublishVolumeRequest {
	req := publishRequest(volume, target)
	req.VolumeContext["crust.dev/handler"] = "kata"
	return req
}

// kataNode is a node with Kata on it.
func kataNode(t *testing.T) (*node, *stand.Node) {
	t.Helper()
	n := newNode(t, func(c *crust.Config) {
		c.HTTPAddress = freeAddress(t)
		c.AdminEndpoint = strings.Replace(c.KEPEndpoint, "kep.sock", "admin.sock", 1)
	})
	return n, stand.At(t, kataRoot(n.path("run")))
}

func (n *node) publishKata(volume, pod string) (target string) {
	n.t.Helper()
	n.driver.Volume(n.t, volume, 64<<20)
	target = n.target(pod)
	if _, err := n.csi().NodePublishVolume(n.t.Context(), kataRequest(volume, target)); err != nil {
		n.t.Fatal(err)
	}
	return target
}

func (n *node) deferral(name string) *adminv1.GetDeferralResponse {
	n.t.Helper()
	conn, err := rpc.Dial(n.path("admin.sock"))
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	resp, err := adminv1.NewAdminClient(conn).GetDeferral(n.t.Context(), &adminv1.GetDeferralRequest{Name: name})
	if err != nil {
		n.t.Fatal(err)
	}
	return resp
}

func (n *node) phase(name, want string) {
	n.t.Helper()
	eventually(n.t, name+" to be "+want, func() error {
		if got := n.deferral(name).GetDeferral().GetPhase(); got != want {
			return fmt.Errorf("it is %s", got)
		}
		return nil
	})
}

// TestKata: a volume goes into a Kata sandbox and back, on both runtimes.
func TestKata(t *testing.T) {
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		t.Run(string(kind), func(t *testing.T) {
			n, k := kataNode(t)
			target := n.publishKata("v1", "pod1")
			s := k.Start("s1", stand.Options{Runtime: kind, Hold: true}).Boot()
			if out, err := s.CreateContainer("c1", stand.Mount{Source: target, Destination: "/data"}); err != nil || !out.Attached {
				t.Fatalf("%+v, %v", out, err)
			}
			n.phase(target, "mounted")
			stats, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v1", VolumePath: target})
			if err != nil || stats.GetUsage()[0].GetTotal() != 60<<20 {
				t.Errorf("stats: %v, %v", stats, err)
			}
			if err := n.unpublish("v1", target); status.Code(err) != codes.FailedPrecondition {
				t.Errorf("unpublish under a sandbox: %v", err)
			}

			// The device grows at once, the filesystem when the volume is published next.
			_, err = n.csi().NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
				VolumeId: "v1", VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 256 << 20},
			})
			if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "delete the pod") {
				t.Errorf("expand: %v", err)
			}
			s.Stop()
			eventually(t, "unpublish", func() error { return n.unpublish("v1", target) })
			if all, err := k.Scan(); err != nil || len(all) > 0 {
				t.Errorf("records: %+v, %v", all, err)
			}
			again := n.target("pod2")
			if _, err := n.csi().NodePublishVolume(t.Context(), kataRequest("v1", again)); err != nil {
				t.Fatal(err)
			}
			all, err := k.Scan()
			if info := all[again]; err != nil || !strings.Contains(info.Metadata["crust.dev/host-assist"], "grow") {
				t.Errorf("record %+v, %v", info, err)
			}
			s = k.Start("s2", stand.Options{Runtime: kind, Hold: true}).Boot()
			if out, err := s.CreateContainer("c2", stand.Mount{Source: again, Destination: "/data"}); err != nil || !out.Attached {
				t.Fatalf("%+v, %v", out, err)
			}
			n.phase(again, "mounted")
			resp, err := n.csi().NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
				VolumeId: "v1", VolumePath: again, CapacityRange: &csi.CapacityRange{RequiredBytes: 256 << 20},
			})
			if err != nil || resp.GetCapacityBytes() != 256<<20 {
				t.Errorf("expand after the next start: %v, %v", resp, err)
			}
		})
	}
}

// TestKataBreach: a sandbox that runs without its volume is reported everywhere, and the report ends when it has it.
func TestKataBreach(t *testing.T) {
	n, k := kataNode(t)
	target := n.publishKata("v1", "pod1")
	broken := k.Start("s1", stand.Options{DisableBlockDevices: true}).Boot()
	if out, err := broken.CreateContainer("c1", stand.Mount{Source: target, Destination: "/data"}); err != nil || out.Attached {
		t.Fatalf("%+v, %v", out, err)
	}
	if err := os.WriteFile(filepath.Join(target, "lost"), nil, 0o600); err == nil {
		t.Error("the pod can write to the node's directory")
	}
	n.logged("breached", target)
	n.phase(target, "breached")
	const cure = "disable_block_device_use=false"
	if findings := n.deferral(target).GetFindings(); len(findings) != 1 || findings[0].GetKind() != "breached" || !strings.Contains(findings[0].GetText(), cure) {
		t.Errorf("findings: %v", findings)
	}
	_, err := n.csi().NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "v1", VolumePath: target})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), cure) {
		t.Errorf("stats: %v", err)
	}
	health := func() []*csi.VolumeHealth_VolumeHealthEntry {
		t.Helper()
		resp, err := n.csi().NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "v1"})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetVolumeHealth().GetHealthStatuses()
	}
	if got := health(); len(got) != 1 || got[0].GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE || got[0].GetReason() != "SandboxWithoutVolume" {
		t.Errorf("health: %v", got)
	}
	_, body := get(t, n.config.HTTPAddress, "/metrics")
	for _, want := range []string{`crust_deferrals{handler="kata",state="breached"} 1`, `crust_reconcile_findings_total{kind="breached"} 1`} {
		if !strings.Contains(body, want+"\n") {
			t.Errorf("the metrics lack %s", want)
		}
	}

	broken.Stop()
	s := k.Start("s2", stand.Options{Hold: true}).Boot()
	if out, err := s.CreateContainer("c1", stand.Mount{Source: target, Destination: "/data"}); err != nil || !out.Attached {
		t.Fatalf("%+v, %v", out, err)
	}
	n.phase(target, "mounted")
	if got := health(); len(got) != 0 {
		t.Errorf("health in a sandbox that has it: %v", got)
	}
}

// TestTrap17NoExclusivity: Kata attaches a disk to any number of sandboxes; the daemon hands it out once.
func TestTrap17NoExclusivity(t *testing.T) {
	n, k := kataNode(t)
	n.publishKata("v1", "pod1")
	_, err := n.csi().NodePublishVolume(t.Context(), kataRequest("v1", n.target("pod2")))
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "ReadWriteOncePod") {
		t.Errorf("publish: %v", err)
	}
	if all, err := k.Scan(); err != nil || len(all) != 1 {
		t.Errorf("records: %+v, %v", all, err)
	}
}

// TestKataReboot: /run is empty, and the daemon puts the records back before the kubelet asks.
func TestKataReboot(t *testing.T) {
	n, k := kataNode(t)
	target := n.publishKata("v1", "pod1")
	n.stop()
	k.Reboot()
	n.start()
	eventually(t, "the record", func() error {
		all, err := k.Scan()
		if err == nil && all[target].Device == "" {
			err = errors.New("there is none")
		}
		return err
	})
}
