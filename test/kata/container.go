package kata

import (
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/kata/config"
)

// Mount is a bind mount of a container, as the container runtime passes it on.
type Mount struct {
	Source, Destination string
	ReadOnly            bool
}

// Outcome says what has become of a mount.
type Outcome struct {
	// Attached: the volume is in the guest. Otherwise the directory of the host is, over virtio-fs.
	Attached bool
	Volume   Volume
}

type container struct {
	id, bundle string
	mounts     []Mount
	created    time.Time
}

// CreateContainer makes a container with one mount, or makes it again after it has ended, and says what the runtime has
// made of the mount. It fails as the runtime's CreateContainer does.
func (s *Sandbox) CreateContainer(id string, m Mount) (Outcome, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.up {
		return Outcome{}, errors.New("the guest is not up")
	}
	c := container{id: id, mounts: []Mount{m}, created: time.Now()}
	c.bundle = s.node.Path("run/containerd/io.containerd.runtime.v2.task/k8s.io", id, "config.json")
	if !s.NoBundle {
		s.node.write(c.bundle, map[string]any{
			"ociVersion":  "1.2.0",
			"annotations": map[string]string{"io.kubernetes.cri.sandbox-id": s.ID, "io.kubernetes.cri.container-type": "container"},
			"mounts": []map[string]any{
				{"destination": "/proc", "type": "proc", "source": "proc"},
				{"destination": m.Destination, "type": "bind", "source": m.Source, "options": []string{"rbind", "rprivate", "rw"}},
			},
		})
	}
	s.containers = append(slices.DeleteFunc(s.containers, func(old container) bool { return old.id == id }), c)
	if s.Runtime == config.Rust {
		return s.createRust(id, m)
	}
	return s.createGo(id, m)
}

// createGo does what createBlockDevices of the Go runtime does: whatever goes wrong before the device, the directory of the
// host is shared instead.
func (s *Sandbox) createGo(id string, m Mount) (Outcome, error) {
	shared := func() (Outcome, error) {
		s.persist(id, map[string]any{"Source": m.Source, "Destination": m.Destination, "BlockDeviceID": ""})
		return Outcome{}, nil
	}
	if s.DisableBlockDevices {
		return shared()
	}
	dir := s.node.RecordDir(m.Source)
	raw, err := os.ReadFile(filepath.Join(dir, infoName))
	if err != nil {
		return shared()
	}
	info, err := ParseGo(raw)
	if err != nil {
		return shared()
	}
	_ = os.WriteFile(filepath.Join(dir, s.ID), nil, 0o600)
	if group := info.Metadata["fsGroup"]; group != "" {
		if gid, err := strconv.Atoi(group); err != nil || gid < 1 || gid > 1<<32-1 {
			return Outcome{}, errors.New("m.FSGroup value was out of range")
		}
	}
	if _, err := os.Stat(info.Device); err != nil || s.AttachFails {
		s.persist(id, map[string]any{"Source": info.Device, "Destination": m.Destination, "BlockDeviceID": ""})
		return Outcome{}, errors.New("rpc error: No such file or directory (os error 2)")
	}
	v := s.attach(info, m.Source, slices.Contains(info.Options, "ro"), func(id string) string {
		return "/run/kata-containers/sandbox/storage/" + base64.URLEncoding.EncodeToString([]byte("02/"+id[:2]))
	})
	if err := s.mountInGuest(info, v.Volume); err != nil {
		return Outcome{}, err
	}
	s.persist(id, map[string]any{"Source": info.Device, "Destination": m.Destination, "BlockDeviceID": v.id})
	return Outcome{Attached: true, Volume: v.Volume}, nil
}

// persist writes the state of a container, and of the sandbox.
func (s *Sandbox) persist(id string, mount map[string]any) {
	s.node.write(filepath.Join(s.dir(), id, "persist.json"), map[string]any{"State": "ready", "Mounts": []any{mount}})
	var devices []any
	for _, v := range s.volumes {
		devices = append(devices, map[string]any{"ID": v.id, "BlockDrive": map[string]any{"File": v.Device, "PCIPath": "02/" + v.id[:2], "VirtPath": "/dev/vd" + v.id[:1]}})
	}
	s.node.write(filepath.Join(s.dir(), "persist.json"), map[string]any{"SandboxContainer": s.ID, "Devices": devices})
}

// createRust does what handler_volumes of runtime-rs does: a record's directory without a valid record is an error, no
// directory is none.
func (s *Sandbox) createRust(id string, m Mount) (Outcome, error) {
	dir := s.node.RecordDir(m.Source)
	if s.Rootless {
		dir = s.node.Path("run/user/1000", dir)
	}
	if _, err := os.Stat(dir); err != nil {
		return Outcome{}, s.share(id, m)
	}
	raw, err := os.ReadFile(filepath.Join(dir, infoName))
	if err != nil {
		return Outcome{}, fmt.Errorf("unexpected error occurs when parse mount info for %q: %w", m.Source, err)
	}
	info, err := ParseRust(raw)
	if err != nil {
		return Outcome{}, fmt.Errorf("unexpected error occurs when parse mount info for %q: %w", m.Source, err)
	}
	if info.VolumeType != "directvol" {
		return Outcome{}, fmt.Errorf("volume type %q is invalid", info.VolumeType)
	}
	if s.AttachFails {
		return Outcome{}, errors.New("do handle device failed")
	}
	v := s.attach(info, m.Source, m.ReadOnly, nil)
	name := fmt.Sprintf("%s-%08x-%s", v.id[:10], len(s.containers), filepath.Base(m.Destination))
	v.Path = "/run/kata-containers/shared/containers/passthrough/" + name
	s.volumes[slices.IndexFunc(s.volumes, func(a attached) bool { return a.id == v.id })].Path = v.Path
	if err := os.MkdirAll(filepath.Join(s.passthrough(), name), 0o750); err != nil {
		return Outcome{}, err
	}
	if err := s.mountInGuest(info, v.Volume); err != nil {
		return Outcome{}, err
	}
	return Outcome{Attached: true, Volume: v.Volume}, nil
}

func (s *Sandbox) passthrough() string {
	return s.node.Path("run/kata-containers/shared/sandboxes", s.ID, "rw/passthrough")
}

// share shows the directory of the host to the guest, by a mount whose name has the form of a direct volume's.
func (s *Sandbox) share(id string, m Mount) error {
	dir := filepath.Join(s.passthrough(), fmt.Sprintf("%.10s-%08x-%s", fmt.Sprintf("%x00000000", id), len(s.containers), filepath.Base(m.Source)))
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	return unix.Mount(m.Source, dir, "", unix.MS_BIND, "")
}

func (s *Sandbox) unshare() {
	entries, _ := os.ReadDir(s.passthrough())
	for _, e := range entries {
		_ = unix.Unmount(filepath.Join(s.passthrough(), e.Name()), unix.MNT_DETACH)
	}
}

// attach plugs a device in, once for all containers.
func (s *Sandbox) attach(info Info, source string, readOnly bool, path func(id string) string) attached {
	for _, v := range s.volumes {
		if v.Device == info.Device {
			return v
		}
	}
	id := fmt.Sprintf("%02x%08x%06x", len(s.volumes)+10, len(s.ID), len(s.volumes))
	v := attached{id: id, source: source, Volume: Volume{Device: info.Device, FSType: info.FSType, Options: info.Options, ReadOnly: readOnly}}
	if path != nil {
		v.Path = path(id)
	}
	s.volumes = append(s.volumes, v)
	return v
}

// mountInGuest is the agent's part.
func (s *Sandbox) mountInGuest(info Info, v Volume) error {
	for _, o := range info.Options {
		switch {
		case o == "loop":
			return errors.New("InvalidMountOption loop")
		case (o == "bind" || o == "rbind") && s.Runtime == config.Go:
			return errors.New("mount with MS_BIND: not a directory")
		}
	}
	if info.Metadata["createFilesystem"] != "" {
		s.node.t.Errorf("the record of %s has the agent format it", v.Device)
	}
	if s.Hold {
		if err := s.hold(v.Device); err != nil {
			return err
		}
	}
	return s.Guest.Mount(v)
}

// RemoveContainer removes a container that has ended. Its mark beside a record stays.
func (s *Sandbox) RemoveContainer(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.containers = slices.DeleteFunc(s.containers, func(c container) bool { return c.id == id })
	return errors.Join(
		os.RemoveAll(filepath.Join(s.dir(), id)),
		os.RemoveAll(s.node.Path("run/containerd/io.containerd.runtime.v2.task/k8s.io", id)),
	)
}
