package kata_test

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
	"crust.dev/crust/runtimehandler/qemu"
	stand "crust.dev/crust/test/kata"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

func TestMain(m *testing.M) {
	assist.Main()
	os.Exit(vm.Main(m))
}

// machine is a guest in a real virtual machine, which does what it is told and nothing that Kata's agent does not do: it
// neither formats nor gives files away.
type machine struct {
	t *testing.T
	*vm.Machine

	mu      sync.Mutex
	mounted map[string]string // mount paths by device
}

func (m *machine) Mount(v stand.Volume) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mounted[v.Device] != "" {
		return nil
	}
	serial := filepath.Base(v.Device)
	if err := m.AttachDisk(vm.Context(m.t), qemu.Disk{Serial: serial, Path: v.Device, ReadOnly: v.ReadOnly}); err != nil {
		return err
	}
	path := "/run/volumes/" + serial
	_, err := m.TryMount(m.t, &guestv1.MountVolumeRequest{Serial: serial, MountPath: path, FsType: v.FSType, MountFlags: v.Options, ReadOnly: v.ReadOnly})
	if err == nil {
		m.mounted[v.Device] = path
	}
	return err
}

func (m *machine) Usage(v stand.Volume) (stand.Usage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	resp, err := m.Agent().GetVolumeStats(vm.Context(m.t), &guestv1.GetVolumeStatsRequest{MountPath: m.mounted[v.Device]})
	if err != nil {
		return stand.Usage{}, rpc.FromWire(err)
	}
	return stand.Usage{
		Total: resp.GetTotalBytes(), Free: resp.GetTotalBytes() - resp.GetUsedBytes(),
		Inodes: resp.GetTotalInodes(), FreeInodes: resp.GetTotalInodes() - resp.GetUsedInodes(),
	}, nil
}

func (m *machine) Resize(stand.Volume) error { return nil }
func (m *machine) Stop()                     {}

// TestRecordIsMounted: what the handler puts out is what a guest's kernel mounts, whichever runtime reads it: a filesystem
// that was made on the host, given to a group, grown between two sandboxes, written in one and read in the next.
func TestRecordIsMounted(t *testing.T) {
	priv.Root(t)
	vm.Need(t)
	n := stand.New(t)
	h, err := kata.New(kata.Config{Root: n.Root, HostAssist: assist.Steps()})
	if err != nil {
		t.Fatal(err)
	}
	const small, large = 320 << 20, 512 << 20
	group := uint32(4711)
	d := runtimehandler.Deferral{
		Driver: "d", VolumeID: "v1", TargetPath: n.Path("pods/u1/volumes/kubernetes.io~csi/pv/mount"), Device: n.Path("disk1"), Serial: "disk1",
		SizeBytes: small, FSType: "xfs", MountFlags: []string{"noatime"}, Group: &group, Format: true, Blankness: runtimehandler.BlanknessNeverWritten,
	}
	if err := os.MkdirAll(d.TargetPath, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.Device, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	resize := func(bytes int64) {
		t.Helper()
		if err := os.Truncate(d.Device, bytes); err != nil {
			t.Fatal(err)
		}
	}
	resize(small)
	for i, kind := range []config.Runtime{config.Go, config.Rust} {
		if err := h.Stage(vm.Context(t), d); err != nil {
			t.Fatal(err)
		}
		guest := &machine{t: t, Machine: vm.Start(t), mounted: map[string]string{}}
		s := n.Start([]string{"s1", "s2"}[i], stand.Options{Runtime: kind, Guest: guest}).Boot()
		if out, err := s.CreateContainer("c"+s.ID, stand.Mount{Source: d.TargetPath, Destination: "/data"}); err != nil || !out.Attached {
			t.Fatalf("%s: %+v, %v", kind, out, err)
		}
		st, err := h.Status(vm.Context(t), d.TargetPath, nil)
		if err != nil || st.Sandbox == nil || !st.Mounted {
			t.Fatalf("%s: status %+v, %v", kind, st, err)
		}
		stats, err := h.Stats(vm.Context(t), d.TargetPath, *st.Sandbox)
		if err != nil || stats.Bytes.Total > d.SizeBytes || stats.Bytes.Total < d.SizeBytes/8*6 {
			t.Errorf("%s: stats of %d bytes: %+v, %v", kind, d.SizeBytes, stats, err)
		}
		path := guest.mounted[d.Device]
		script := "[ \"$(stat -c %g " + path + ")\" = 4711 ] && echo data > " + path + "/file && sync -f " + path
		if i > 0 {
			script = "[ \"$(cat " + path + "/file)\" = data ]"
		}
		guest.Shell(t, script)
		guest.Unmount(t, path)
		guest.Detach(t, filepath.Base(d.Device))
		s.Stop()
		if err := h.Unstage(vm.Context(t), d.TargetPath); err != nil {
			t.Fatal(err)
		}
		// For the next sandbox.
		resize(large)
		d.SizeBytes, d.Format, d.Blankness = large, false, runtimehandler.BlanknessUnknown
	}
	if all, err := n.Scan(); err != nil || len(all) > 0 {
		t.Errorf("left: %+v, %v", all, err)
	}
}
