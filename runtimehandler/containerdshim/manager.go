package containerdshim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	bootstrap "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/v2/core/mount"
	containerd "github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/log"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
)

// Runtime is the name of the runtime in containerd's configuration; containerd makes the name of the binary of it.
const Runtime = "io.containerd.crust.v2"

// Main is the whole of the shim's binary.
func Main(ctx context.Context) {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn: func(ic *plugin.InitContext) (any, error) {
			publisher, err := ic.GetByID(plugins.EventPlugin, "publisher")
			if err != nil {
				return nil, err
			}
			sd, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
			if err != nil {
				return nil, err
			}
			// The framework has opened the pipe to containerd's log.
			logger := slog.New(slog.NewTextHandler(log.G(ic.Context).Logger.Out, nil))
			return newService(ic.Context, publisher.(shim.Publisher), sd.(shutdown.Service), logger)
		},
	})
	shim.RunShim(ctx, manager{}, func(c *shim.Config) {
		// Whose child ends is told by whoever has started it: the framework would take QEMU's end away from it.
		c.NoReaper, c.NoSubreaper = true, true
	})
}

// manager starts and cleans up after shims, in short-lived processes of the same binary.
type manager struct{}

// Name is the runtime's.
func (manager) Name() string { return Runtime }

// Start starts the process that serves a pod, or finds it: containers of a pod have one in common.
func (manager) Start(ctx context.Context, params *bootstrap.BootstrapParams) (*bootstrap.BootstrapResult, error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, err
	}
	bundle, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	spec, err := readSpec(bundle)
	if err != nil {
		return nil, err
	}
	id := params.GetInstanceID()
	dir := cmp.Or(params.GetSocketDir(), filepath.Join(containerd.DefaultStateDir, "s"))
	address, err := shim.CreateSocketAddress(ctx, dir, params.GetContainerdGrpcAddress(), cmp.Or(spec.Annotations[annotationSandbox], id), false)
	if err != nil {
		return nil, err
	}
	result := &bootstrap.BootstrapResult{Version: 3, Protocol: "ttrpc", Address: address}
	listener, err := shim.NewSocket(address)
	if shim.SocketEaddrinuse(err) {
		if shim.CanConnect(address) {
			return result, nil
		}
		if err = shim.RemoveSocket(address); err == nil { // of one that has been killed
			listener, err = shim.NewSocket(address)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", address, err)
	}
	defer listener.Close()
	listener.SetUnlinkOnClose(false) // it is the other process's from here on
	if err := launch(ns, id, params, listener.File); err != nil {
		return nil, errors.Join(err, shim.RemoveSocket(address))
	}
	return result, nil
}

// launch starts the serving process with the socket as its third descriptor, where the framework looks for it.
func launch(ns, id string, params *bootstrap.BootstrapParams, socket func() (*os.File, error)) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	file, err := socket()
	if err != nil {
		return err
	}
	defer file.Close()
	args := []string{"-namespace", ns, "-id", id, "-address", params.GetContainerdGrpcAddress()}
	if params.GetLogLevel() <= bootstrap.LogLevel_LOG_LEVEL_DEBUG {
		args = append(args, "-debug")
	}
	cmd := exec.Command(self, args...)
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start shim: %w", err)
	}
	return cmd.Process.Release()
}

// Stop cleans up after a shim that has ended without being asked to. Its machine has ended with it, and crustd has noticed;
// what can be left is the mount of a root filesystem that was being copied.
func (manager) Stop(_ context.Context, id string) (shim.StopStatus, error) {
	bundle, err := os.Getwd()
	if err != nil {
		return shim.StopStatus{}, err
	}
	root := filepath.Join(filepath.Dir(bundle), id, "rootfs")
	if err := mount.UnmountRecursive(root, 0); err != nil {
		return shim.StopStatus{}, fmt.Errorf("root filesystem: %w", err)
	}
	return shim.StopStatus{ExitStatus: int(exitLost), ExitedAt: time.Now()}, nil
}

// Info describes the runtime.
func (manager) Info(context.Context, io.Reader) (*types.RuntimeInfo, error) {
	return &types.RuntimeInfo{Name: Runtime, Version: &types.RuntimeVersion{Version: "v2"}}, nil
}
