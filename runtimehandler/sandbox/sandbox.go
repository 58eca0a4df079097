package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/shim"
)

// Runtime is what our sandboxes call their kind of runtime.
const Runtime = "qemu"

const (
	// connectTimeout is how long crustd may take to answer a new sandbox.
	connectTimeout = 30 * time.Second
	// infoTimeout bounds the first question to the guest.
	infoTimeout = 30 * time.Second
	// stopTimeout bounds everything between the wish to stop and the end of the VM.
	stopTimeout = 90 * time.Second
	// reportTimeout bounds what is told to crustd after that. If it is not there, nobody waits for it: it finds out when the
	// processes have ended.
	reportTimeout = 5 * time.Second
)

// Config is one sandbox. Paths are absolute.
type Config struct {
	// ID is unique on the node: letters, digits, '.', '_', '-', at most 64 bytes.
	ID string
	// Root is where directories of sandboxes are.
	Root string
	// RuntimeSocket is that of crustd.
	RuntimeSocket string
	// Mounts are a container's mounts; all of them must be deferrals, because the host's directories are not shared.
	Mounts []shim.Mount
	// VM is the machine; its directory is filled in.
	VM  qemu.Config
	Log *slog.Logger
}

// Sandbox is one microVM with its volumes.
type Sandbox struct {
	config    Config
	directory *directory
	info      Info

	vm      *qemu.VM
	client  *shim.Client
	volumes *shim.Volumes
	serving sync.WaitGroup
}

// New checks a configuration. It does no I/O.
func New(c Config) (*Sandbox, error) {
	switch {
	case !validID.MatchString(c.ID):
		return nil, fmt.Errorf("sandbox id %q: want %s: %w", c.ID, validID, errdefs.ErrInvalidArgument)
	case !filepath.IsAbs(c.Root) || !filepath.IsAbs(c.RuntimeSocket):
		return nil, fmt.Errorf("sandbox %s: root %q and crustd's socket %q must be absolute: %w", c.ID, c.Root, c.RuntimeSocket, errdefs.ErrInvalidArgument)
	case c.Log == nil:
		return nil, fmt.Errorf("sandbox %s: a logger is needed: %w", c.ID, errdefs.ErrInvalidArgument)
	}
	for _, m := range c.Mounts {
		if m.Source == "" || !filepath.IsAbs(m.Destination) {
			return nil, fmt.Errorf("sandbox %s: mount %q at %q: want a source and an absolute destination: %w", c.ID, m.Source, m.Destination, errdefs.ErrInvalidArgument)
		}
	}
	c.Log = c.Log.With(rpc.LogSandbox, c.ID)
	c.VM.Log = c.Log
	return &Sandbox{config: c}, nil
}

// Run boots the machine, mounts the volumes, calls ready, and stays until ctx ends or the machine does. Then it gives
// everything back. It returns nil only if the volumes were unmounted by the guest. If crustd is not there then, they are
// free once this process has ended.
func (s *Sandbox) Run(ctx context.Context, ready func(Info)) (err error) {
	if s.directory, err = claimDirectory(s.config.Root, s.config.ID); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.directory.remove()) }()
	listener, err := rpc.Listen(ctx, s.directory.file(controlName))
	if err != nil {
		return err
	}
	if err := s.boot(ctx); err != nil {
		return errors.Join(err, listener.Close())
	}
	defer func() { err = errors.Join(err, s.end(ctx)) }()
	stopServing := s.serve(ctx, listener)
	defer stopServing()
	if err := s.mount(ctx); err != nil {
		return err
	}
	s.info.Ready = true
	if err := s.directory.write(s.info); err != nil {
		return err
	}
	ready(s.info)
	select {
	case <-ctx.Done():
		return nil
	case <-s.vm.Done():
		return fmt.Errorf("sandbox %s: the machine has ended by itself; its console ends with: %s: %w", s.config.ID, s.vm.Console(), errdefs.ErrUnavailable)
	}
}

// boot starts the machine and registers with the daemon.
func (s *Sandbox) boot(ctx context.Context) (err error) {
	s.info = Info{ID: s.config.ID, PID: os.Getpid(), Started: time.Now().UTC(), Accel: string(s.config.VM.Accel)}
	if err := s.directory.write(s.info); err != nil {
		return err
	}
	s.config.VM.Dir = s.directory.file(vmName)
	if err := os.Mkdir(s.config.VM.Dir, 0o700); err != nil {
		return fmt.Errorf("sandbox %s: %w", s.config.ID, err)
	}
	if s.vm, err = qemu.Start(ctx, s.config.VM); err != nil {
		return fmt.Errorf("sandbox %s: %w", s.config.ID, err)
	}
	s.info.VMMPID = s.vm.PID()
	if err := s.connect(ctx); err != nil {
		s.vm.Kill()
		return err
	}
	s.volumes = shim.NewVolumes(s.client, machine{s.vm}, s.vm.Agent())
	return nil
}

func (s *Sandbox) connect(ctx context.Context) error {
	infoCtx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	guest, err := s.vm.Agent().GetInfo(infoCtx, &guestv1.GetInfoRequest{})
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", s.config.ID, rpc.FromWire(err))
	}
	s.config.Log.InfoContext(ctx, "guest is up", "kernel", guest.GetKernel(), "agent", guest.GetVersion(), "filesystems", guest.GetFsTypes())
	connectCtx, cancelConnect := context.WithTimeout(ctx, connectTimeout)
	defer cancelConnect()
	s.client, err = shim.Connect(connectCtx, s.config.RuntimeSocket, shim.Sandbox{
		ID:      s.config.ID,
		Runtime: Runtime,
		Address: s.directory.file(controlName),
		VMMPID:  s.vm.PID(),
		FSTypes: guest.GetFsTypes(),
		Capabilities: runtimehandler.Capabilities{
			Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true, Freeze: true,
		},
	}, s.config.Log)
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", s.config.ID, err)
	}
	return nil
}

// serve answers on the control socket until the function that it returns is called.
func (s *Sandbox) serve(ctx context.Context, l net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.serving.Go(func() {
		err := rpc.ServeTTRPC(ctx, l, s.config.Log, func(_ context.Context, _ rpc.Peer, server *ttrpc.Server) {
			s.volumes.Register(server)
			guestv1.RegisterTTRPCAgentService(server, people{agent: s.vm.Agent()})
		})
		if err != nil {
			s.config.Log.ErrorContext(ctx, "control socket", rpc.LogError, err)
		}
	})
	return func() {
		cancel()
		s.serving.Wait()
	}
}

// mount makes the volumes appear in the guest. What is no deferral would silently be missing there, so it is refused.
func (s *Sandbox) mount(ctx context.Context) error {
	found, err := s.volumes.Mount(ctx, s.config.Mounts)
	if err != nil {
		return fmt.Errorf("sandbox %s: %w", s.config.ID, err)
	}
	for i, m := range s.config.Mounts {
		if _, ok := found[i]; !ok {
			return fmt.Errorf("sandbox %s: %s is not the target path of a deferred volume, and directories of the host are not shared: %w",
				s.config.ID, m.Source, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// end has the guest unmount everything and stops the machine, by force if it must, and gives the volumes back. It does
// not listen to ctx, which has ended as a rule.
func (s *Sandbox) end(ctx context.Context) error {
	defer s.client.Close()
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	err := s.vm.Stop(stopCtx)
	// The machine's process is gone: what could not be unmounted is free all the same.
	reportCtx, cancelReport := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancelReport()
	if unheard := s.volumes.ReleaseDead(reportCtx); unheard != nil {
		s.config.Log.WarnContext(ctx, "crustd is not told that the volumes are free; it finds out when this process has ended", rpc.LogError, unheard)
	}
	return err
}

// VM is the machine. It is there from the call of ready on.
func (s *Sandbox) VM() *qemu.VM { return s.vm }

// Resolve asks crustd which mounts are deferrals, and claims them for the sandbox; see [shim.Client.Resolve]. From the call
// of ready on.
func (s *Sandbox) Resolve(ctx context.Context, mounts []shim.Mount) ([]shim.Resolved, error) {
	return s.client.Resolve(ctx, mounts)
}

// Volumes are the deferrals in the sandbox, from the call of ready on. Those that are mounted at the end are given back.
func (s *Sandbox) Volumes() *shim.Volumes { return s.volumes }

// machine is the part of a VM that volumes need.
type machine struct{ vm *qemu.VM }

func (m machine) AttachDisk(ctx context.Context, d shim.Disk) error {
	return m.vm.AttachDisk(ctx, qemu.Disk{Serial: d.Serial, Path: d.Path, ReadOnly: d.ReadOnly})
}

func (m machine) DetachDisk(ctx context.Context, serial string) error {
	return m.vm.DetachDisk(ctx, serial)
}

func (m machine) ResizeDisk(ctx context.Context, serial string) (int64, error) {
	return m.vm.ResizeDisk(ctx, serial)
}
