package containerdshim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/shim"
)

const (
	// containersRoot is where root filesystems are mounted in the guest.
	containersRoot = "/run/crust/containers"
	// mountTimeout bounds the mount of a root filesystem in the guest.
	mountTimeout = 2 * time.Minute
	// undoTimeout bounds the clean-up after a failure.
	undoTimeout = time.Minute
)

// container is one container of the pod; the sandbox container has no root filesystem and no processes.
type container struct {
	id, bundle string
	spec       *specs.Spec
	init       *process
	sandbox    bool

	pod     *pod
	serial  string  // of its disk
	volumes []bound // in the order in which they were shown

	mu    sync.Mutex
	execs map[string]*process
}

// bound is a volume that is shown to the container.
type bound struct {
	deferral    runtimehandler.Deferral
	destination string // in the guest
}

// readSpec reads the OCI specification of a bundle.
func readSpec(bundle string) (*specs.Spec, error) {
	raw, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return nil, fmt.Errorf("OCI specification: %w", err)
	}
	var s specs.Spec
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, fmt.Errorf("OCI specification: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return &s, checkSpec(&s)
}

// root is the root filesystem in the guest.
func (c *container) root() string { return path.Join(containersRoot, c.id) }

func (c *container) agent() guestv1.TTRPCAgentService { return c.pod.VM().Agent() }

// create gives the container its root filesystem and volumes in the guest. When it fails nothing of it is left.
func (c *container) create(ctx context.Context, rootfs []*types.Mount) (err error) {
	defer func() {
		if err != nil {
			undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
			defer cancel()
			err = errors.Join(err, c.remove(undo))
		}
	}()
	list, index := candidates(c.spec.Mounts)
	resolved, err := c.pod.Resolve(ctx, list)
	if err != nil {
		return err
	}
	var deferrals []int
	for _, r := range resolved {
		deferrals = append(deferrals, index[r.Index])
	}
	p, err := planMounts(c.id, c.spec.Mounts, deferrals)
	if err != nil {
		return err
	}
	file, prepare, err := c.makeRoot(ctx, rootfs, &p)
	if err != nil {
		return err
	}
	// The machine has the file open from here on, and nobody else needs its name.
	err = c.pod.VM().AttachDisk(ctx, qemu.Disk{Serial: c.serial, Path: file})
	if err = errors.Join(err, os.Remove(file)); err != nil {
		return err
	}
	if err := c.mountRoot(ctx, prepare); err != nil {
		return err
	}
	return c.showVolumes(ctx, p.volumes)
}

// makeRoot makes the disk image of the root filesystem. Paths in the plan are resolved on the way.
func (c *container) makeRoot(ctx context.Context, rootfs []*types.Mount, p *plan) (file string, _ *guestv1.PrepareRootRequest, err error) {
	work, err := filepath.EvalSymlinks(filepath.Join(c.bundle, "work")) // on a disk, and containerd removes it whatever happens
	if err != nil {
		return "", nil, fmt.Errorf("bundle: %w", err)
	}
	tree := rootTree(filepath.Join(c.bundle, "rootfs"))
	if err := os.MkdirAll(string(tree), 0o711); err != nil {
		return "", nil, err
	}
	if err := mount.All(mountsOf(rootfs), string(tree)); err != nil {
		return "", nil, fmt.Errorf("root filesystem: %w", err)
	}
	defer func() { err = errors.Join(err, mount.UnmountRecursive(string(tree), 0)) }()
	prepare := &guestv1.PrepareRootRequest{MountPath: c.root()}
	if err := c.fill(tree, p, prepare); err != nil {
		return "", nil, err
	}
	file = filepath.Join(work, "rootfs.img")
	return file, prepare, tree.makeImage(ctx, file, c.pod.config.RootBytes)
}

func mountsOf(list []*types.Mount) []mount.Mount {
	var mounts []mount.Mount
	for _, m := range list {
		mounts = append(mounts, mount.Mount{Type: m.GetType(), Source: m.GetSource(), Target: m.GetTarget(), Options: m.GetOptions()})
	}
	return mounts
}

// fill puts into the tree what is copied, and says what the guest is to mount beneath it.
func (c *container) fill(tree rootTree, p *plan, prepare *guestv1.PrepareRootRequest) error {
	for _, dir := range []string{"/proc", "/sys", "/dev", cwd(c.spec)} {
		if path.Clean(dir) == "/" {
			continue
		}
		if _, err := tree.makeDir(dir); err != nil {
			return err
		}
	}
	for _, f := range p.copies {
		if strings.HasPrefix(f.destination, "/dev/") {
			continue // hidden by the guest's own /dev; a termination message is read from the log instead
		}
		to, err := tree.copyIn(f.source, f.destination)
		if err != nil {
			return err
		}
		if f.readOnly {
			prepare.Mounts = append(prepare.Mounts, &guestv1.RootMount{Destination: to, ReadOnly: true})
		}
	}
	for _, s := range p.shared {
		to, err := tree.makeDir(s.destination)
		if err != nil {
			return err
		}
		prepare.Mounts = append(prepare.Mounts, &guestv1.RootMount{Destination: to, Shared: s.name, ReadOnly: s.readOnly})
	}
	for i, v := range p.volumes {
		to, err := tree.makeParent(v.Destination)
		if err != nil {
			return err
		}
		p.volumes[i].Destination = path.Join(c.root(), to)
	}
	c.setHome(tree)
	return nil
}

// setHome adds the user's home directory to the environment, as OCI runtimes do. An image need not have any users.
func (c *container) setHome(tree rootTree) {
	p := c.spec.Process
	if slices.ContainsFunc(p.Env, func(e string) bool { return strings.HasPrefix(e, "HOME=") }) {
		return
	}
	home := "/"
	if passwd, err := tree.resolve("/etc/passwd"); err == nil {
		users, err := user.ParsePasswdFileFilter(filepath.Join(string(tree), passwd), func(u user.User) bool { return u.Uid == int(p.User.UID) })
		if err == nil && len(users) > 0 && users[0].Home != "" {
			home = users[0].Home
		}
	}
	p.Env = append(p.Env, "HOME="+home)
}

func cwd(s *specs.Spec) string {
	if s.Process.Cwd == "" {
		return "/"
	}
	return s.Process.Cwd
}

func (c *container) mountRoot(ctx context.Context, prepare *guestv1.PrepareRootRequest) error {
	ctx, cancel := context.WithTimeout(ctx, mountTimeout)
	defer cancel()
	_, err := c.agent().MountVolume(ctx, &guestv1.MountVolumeRequest{
		Serial: c.serial, MountPath: c.root(), FsType: "ext4", Format: guestv1.FormatPolicy_FORMAT_POLICY_NEVER,
	})
	if err == nil {
		_, err = c.agent().PrepareRoot(ctx, prepare)
	}
	if err != nil {
		return fmt.Errorf("root filesystem in the guest: %w", rpc.FromWire(err))
	}
	return nil
}

// showVolumes mounts the deferrals and makes them appear in the container.
func (c *container) showVolumes(ctx context.Context, mounts []shim.Mount) error {
	shown, err := c.pod.Volumes().Mount(ctx, mounts)
	if err != nil {
		return err
	}
	for i, m := range mounts {
		d, ok := shown[i]
		if !ok {
			return fmt.Errorf("%s was a deferred volume a moment ago and is none now: %w", m.Source, errdefs.ErrFailedPrecondition)
		}
		c.volumes = append(c.volumes, bound{d, m.Destination})
	}
	return nil
}

// remove takes everything of the container out of the guest: volumes from its view, its root filesystem, its disk. A
// machine that has ended has nothing of it. It may be called again when it has failed.
func (c *container) remove(ctx context.Context) error {
	if c.sandbox {
		return nil
	}
	select {
	case <-c.pod.ended:
		return nil
	default:
	}
	all := c.allExecs()
	if c.init != nil { // it has been created
		all = append(all, c.init)
	}
	for _, p := range all {
		if err := p.forget(ctx, c.agent()); err != nil {
			return fmt.Errorf("container %s: %w", c.id, err)
		}
	}
	for len(c.volumes) > 0 {
		last := c.volumes[len(c.volumes)-1]
		if err := c.pod.Volumes().Unbind(ctx, last.deferral, last.destination); err != nil {
			return fmt.Errorf("container %s: %w", c.id, err)
		}
		c.volumes = c.volumes[:len(c.volumes)-1]
	}
	callCtx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	if _, err := c.agent().UnmountVolume(callCtx, &guestv1.UnmountVolumeRequest{MountPath: c.root()}); err != nil {
		return fmt.Errorf("container %s: %w", c.id, rpc.FromWire(err))
	}
	return c.pod.VM().DetachDisk(ctx, c.serial)
}

// request is what starts a process of the container. join is the first process in the guest; empty: this is the first.
func (c *container) request(p *specs.Process, stdin bool, join string) *guestv1.StartExecRequest {
	return &guestv1.StartExecRequest{
		Argv: p.Args, Env: p.Env, Cwd: p.Cwd, Stdin: stdin,
		Container: &guestv1.ContainerProcess{
			Root: c.root(), Uid: p.User.UID, Gid: p.User.GID, AdditionalGids: p.User.AdditionalGids, Join: join,
		},
	}
}

func (c *container) allExecs() []*process {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []*process
	for _, p := range c.execs {
		list = append(list, p)
	}
	return list
}

// process returns the process of an exec id; empty is the first.
func (c *container) process(execID string) (*process, error) {
	if execID == "" {
		return c.init, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.execs[execID]
	if p == nil {
		return nil, fmt.Errorf("container %s has no process %s: %w", c.id, execID, errdefs.ErrNotFound)
	}
	return p, nil
}
