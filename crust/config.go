package crust

import (
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/policy"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// Config is how the daemon runs. All paths are absolute; endpoints are unix sockets ("unix:///path").
type Config struct {
	// Drivers are the CSI drivers that the daemon fronts; at least one.
	Drivers []Driver
	// RuntimeEndpoint is the ttrpc socket on which shims register. It also serves the Runtime service of KEP-2857.
	RuntimeEndpoint string
	// KEPEndpoint is a gRPC socket for drivers, with the Runtime service of KEP-2857 and Consistency; empty: none.
	KEPEndpoint string
	// AdminEndpoint is a gRPC socket for crustctl; empty: none.
	AdminEndpoint string
	// HTTPAddress is a TCP address for /healthz, /readyz and /metrics; empty: none. Profiling adds /debug/pprof.
	HTTPAddress string
	Profiling   bool
	// RegistrationDir is the kubelet's directory for plugin registration sockets, for drivers with Register.
	RegistrationDir string
	// StateDir holds the journal. It must outlive reboots.
	StateDir string
	// DeviceRoots are the directories from which devices may come, an image file or a device node as well; none: all. A
	// driver that names another one is refused with PERMISSION_DENIED.
	DeviceRoots []string
	// Handlers are the kinds of runtimes that the daemon works with.
	Handlers []runtimehandler.Handler
	// ShimHandler is the name of the handler that reaches shims that register.
	ShimHandler string
	// DefaultHandler is the name of the handler for volumes for which nothing else says which.
	DefaultHandler string
	// DefaultPolicy stands for the parameter crust.dev/defer of volumes that have none: "never" (the default) or "auto".
	DefaultPolicy string
	// RuntimeClasses maps the handlers of RuntimeClasses to those in Handlers. The volumes of their pods are deferred
	// where a volume leaves the choice to the pod.
	RuntimeClasses map[string]string
	// Kubernetes says which API server knows the pods; nil: none does.
	Kubernetes *Kubernetes
	// File is the file that all this comes from, which the daemon follows; nil: none.
	File *File
	// Version is that of the build.
	Version string
	Log     *slog.Logger
	// LogLevel is the level of Log; nil if it cannot change.
	LogLevel *slog.LevelVar
}

// Kubernetes says how to reach an API server.
type Kubernetes struct {
	// Kubeconfig is a file; empty: the service account of the pod that the daemon runs in.
	Kubeconfig string
	// Node is the name of this node's Node object.
	Node string
}

// Driver is one CSI driver.
type Driver struct {
	// Endpoint is the socket on which the daemon serves CSI in the driver's place.
	Endpoint string
	// Upstream is the driver's own socket. The driver may start later, and restart.
	Upstream string
	// Register has the daemon register the driver with the kubelet, in the place of node-driver-registrar.
	Register bool
}

// validate checks a configuration and returns the paths of its sockets, in the order of their fields.
func (c Config) validate() (*sockets, error) {
	if len(c.Drivers) == 0 {
		return nil, fmt.Errorf("no driver is configured: %w", errdefs.ErrInvalidArgument)
	}
	s := &sockets{}
	var all []string
	parse := func(field, endpoint string, path *string) error {
		parsed, err := rpc.ParseEndpoint(endpoint)
		if err != nil {
			return fmt.Errorf("%s: %w", field, err)
		}
		if slices.Contains(all, parsed) {
			return fmt.Errorf("%s: %s is used twice: %w", field, parsed, errdefs.ErrInvalidArgument)
		}
		all = append(all, parsed)
		*path = parsed
		return nil
	}
	s.drivers = make([]driverSockets, len(c.Drivers))
	for i, d := range c.Drivers {
		if err := parse("endpoint", d.Endpoint, &s.drivers[i].endpoint); err != nil {
			return nil, err
		}
		if err := parse("driver endpoint", d.Upstream, &s.drivers[i].upstream); err != nil {
			return nil, err
		}
	}
	if err := parse("runtime endpoint", c.RuntimeEndpoint, &s.runtime); err != nil {
		return nil, err
	}
	for _, optional := range []struct {
		field, endpoint string
		path            *string
	}{{"KEP endpoint", c.KEPEndpoint, &s.kep}, {"admin endpoint", c.AdminEndpoint, &s.admin}} {
		if optional.endpoint == "" {
			continue
		}
		if err := parse(optional.field, optional.endpoint, optional.path); err != nil {
			return nil, err
		}
	}
	return s, c.validateRest()
}

func (c Config) validateRest() error {
	if !filepath.IsAbs(c.StateDir) {
		return fmt.Errorf("state directory %q is not absolute: %w", c.StateDir, errdefs.ErrInvalidArgument)
	}
	for _, root := range c.DeviceRoots {
		if !filepath.IsAbs(root) || filepath.Clean(root) != root {
			return fmt.Errorf("device root %q is not a clean absolute path: %w", root, errdefs.ErrInvalidArgument)
		}
	}
	if slices.ContainsFunc(c.Drivers, func(d Driver) bool { return d.Register }) && !filepath.IsAbs(c.RegistrationDir) {
		return fmt.Errorf("registration directory %q is not absolute: %w", c.RegistrationDir, errdefs.ErrInvalidArgument)
	}
	if c.Profiling && c.HTTPAddress == "" {
		return fmt.Errorf("profiling is on, but there is no HTTP address to serve it at: %w", errdefs.ErrInvalidArgument)
	}
	if c.File != nil && (!filepath.IsAbs(c.File.Path) || c.File.Read == nil) {
		return fmt.Errorf("configuration file %q is not absolute, or cannot be read again: %w", c.File.Path, errdefs.ErrInvalidArgument)
	}
	if err := policy.CheckDefault(c.DefaultPolicy, c.Kubernetes != nil); err != nil {
		return err
	}
	if c.Log == nil {
		return fmt.Errorf("a logger is needed: %w", errdefs.ErrInvalidArgument)
	}
	for i, h := range c.Handlers {
		if slices.ContainsFunc(c.Handlers[:i], func(other runtimehandler.Handler) bool { return other.Name() == h.Name() }) {
			return fmt.Errorf("two handlers are called %q; give one another name: %w", h.Name(), errdefs.ErrInvalidArgument)
		}
	}
	for _, field := range []struct{ name, handler string }{{"shim handler", c.ShimHandler}, {"default handler", c.DefaultHandler}} {
		if err := c.checkHandler(field.name, field.handler); err != nil {
			return err
		}
	}
	return c.checkClasses(c.RuntimeClasses)
}

// checkClasses checks that RuntimeClasses name handlers that there are.
func (c Config) checkClasses(classes map[string]string) error {
	for _, class := range slices.Sorted(maps.Keys(classes)) {
		if err := c.checkHandler("handler of RuntimeClass handler "+class, classes[class]); err != nil {
			return err
		}
	}
	return nil
}

func (c Config) checkHandler(field, name string) error {
	var names []string
	for _, h := range c.Handlers {
		names = append(names, h.Name())
	}
	if !slices.Contains(names, name) {
		return fmt.Errorf("%s %q is none of the handlers (%s): %w", field, name, strings.Join(names, ", "), errdefs.ErrInvalidArgument)
	}
	return nil
}

// sockets are the paths of all sockets; kep and admin may be empty.
type sockets struct {
	drivers             []driverSockets
	runtime, kep, admin string
}

type driverSockets struct{ endpoint, upstream string }
