package main

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/spf13/pflag"

	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/crust"
	"crust.dev/crust/crust/configfile"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/remote"
)

// What holds where neither a flag nor the file says anything.
const (
	defaultEndpoint        = "unix:///run/crust/csi.sock"
	defaultRuntimeEndpoint = "unix:///run/crust/runtime.sock"
	defaultStateDir        = "/var/lib/crust"
	defaultRegistrationDir = "/var/lib/kubelet/plugins_registry"
	defaultPolicy          = "never"
	// adminSocket is the name of the admin socket, which is beside the one for shims.
	adminSocket = "admin.sock"
)

// options are the flags. Those that the file has a key for count only if they are set.
type options struct {
	flags       *pflag.FlagSet
	config      string
	checkConfig bool

	driver          configfile.Driver
	runtimeEndpoint string
	kepEndpoint     string
	adminEndpoint   string
	httpAddress     string
	profiling       bool
	registrationDir string
	stateDir        string
	policy          string
	kubeconfig      string
	node            string
	logLevel        string
	logFormat       string
}

func (o *options) declare() {
	f := o.flags
	f.StringVar(&o.config, "config", "", "configuration file, such as /etc/crust/crustd.yaml; it is followed when it changes")
	f.BoolVar(&o.checkConfig, "check-config", false, "check the configuration, change nothing, and exit: 0 if it is in order, 1 if not")
	f.StringVar(&o.driver.Endpoint, "endpoint", defaultEndpoint, "socket on which to serve CSI")
	f.StringVar(&o.driver.Upstream, "driver-endpoint", "", "the CSI socket of the driver")
	f.BoolVar(&o.driver.Register, "register", false, "register the driver with the kubelet, in the place of node-driver-registrar")
	f.StringVar(&o.registrationDir, "registration-dir", defaultRegistrationDir, "the kubelet's directory for plugin registration")
	f.StringVar(&o.runtimeEndpoint, "runtime-endpoint", defaultRuntimeEndpoint, "socket on which shims register their sandboxes")
	f.StringVar(&o.kepEndpoint, "kep-endpoint", "", "socket for drivers with the Runtime service of KEP-2857; empty: none")
	f.StringVar(&o.adminEndpoint, "admin-endpoint", "", "socket for crustctl; empty: none (default "+adminSocket+" beside the runtime endpoint)")
	f.StringVar(&o.httpAddress, "http-address", "", "HOST:PORT for /healthz, /readyz and /metrics; empty: none")
	f.BoolVar(&o.profiling, "profiling", false, "serve /debug/pprof, too")
	f.StringVar(&o.stateDir, "state-dir", defaultStateDir, "directory of the journal; it must outlive reboots")
	f.StringVar(&o.policy, "default-policy", defaultPolicy, "what stands for the parameter crust.dev/defer of volumes that have none: never or auto")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "file that says how to reach the API server; in a pod, \"kubernetes: {}\" in the file does")
	f.StringVar(&o.node, "node", "", "name of this node's Node object (default $NODE_NAME)")
	f.StringVar(&o.logLevel, "log-level", "info", "least level to log: debug, info, warn, error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
}

// load reads the file, if there is one, and returns the configuration with a log that goes to w.
func (o *options) load(w io.Writer) (crust.Config, error) {
	file := &configfile.File{}
	if o.config != "" {
		var err error
		if o.config, err = filepath.Abs(o.config); err != nil {
			return crust.Config{}, err
		}
		if file, err = configfile.Read(o.config); err != nil {
			return crust.Config{}, err
		}
	}
	config, err := o.build(file, nil)
	if err != nil {
		return config, err
	}
	level, err := o.level(file)
	if err != nil {
		return config, err
	}
	config.LogLevel = &slog.LevelVar{}
	config.LogLevel.Set(level)
	if config.Log, err = command.NewLogger(w, config.LogLevel, o.text("log-format", o.logFormat, file.Log.Format)); err != nil {
		return config, err
	}
	if o.config != "" {
		r := &reloader{options: o, started: file, handlers: config.Handlers}
		config.File = &crust.File{Path: o.config, Read: r.read}
	}
	return config, nil
}

// build puts file, flags and defaults together. It makes the handlers of the file unless there are some already.
func (o *options) build(file *configfile.File, existing []runtimehandler.Handler) (crust.Config, error) {
	drivers, err := o.drivers(file)
	if err != nil {
		return crust.Config{}, err
	}
	config := crust.Config{
		Drivers:         drivers,
		RuntimeEndpoint: o.text("runtime-endpoint", o.runtimeEndpoint, file.RuntimeEndpoint),
		KEPEndpoint:     o.text("kep-endpoint", o.kepEndpoint, file.KEPEndpoint),
		HTTPAddress:     o.text("http-address", o.httpAddress, file.HTTP.Address),
		Profiling:       o.truth("profiling", o.profiling, file.HTTP.Profiling),
		RegistrationDir: o.text("registration-dir", o.registrationDir, file.RegistrationDir),
		StateDir:        o.text("state-dir", o.stateDir, file.StateDir),
		DeviceRoots:     file.DeviceRoots,
		ShimHandler:     cmp.Or(file.ShimHandler, remote.Name),
		DefaultHandler:  cmp.Or(file.DefaultHandler, remote.Name),
		DefaultPolicy:   o.text("default-policy", o.policy, file.Policy.Default),
		RuntimeClasses:  file.RuntimeClasses,
		Kubernetes:      o.kubernetes(file.Kubernetes),
		Version:         command.Version(),
	}
	config.AdminEndpoint = "unix://" + filepath.Join(filepath.Dir(socketPath(config.RuntimeEndpoint)), adminSocket)
	if file.AdminEndpoint != nil {
		config.AdminEndpoint = *file.AdminEndpoint
	}
	if o.flags.Changed("admin-endpoint") {
		config.AdminEndpoint = o.adminEndpoint
	}
	if config.Handlers = existing; existing == nil {
		config.Handlers, err = handlers(file, config)
	}
	return config, err
}

// drivers are those of the file; flags describe a single one.
func (o *options) drivers(file *configfile.File) ([]crust.Driver, error) {
	set := o.flags.Changed("endpoint") || o.flags.Changed("driver-endpoint") || o.flags.Changed("register")
	if set && len(file.Drivers) > 1 {
		return nil, fmt.Errorf("--endpoint, --driver-endpoint and --register describe one driver, and %s has %d; leave the flags out: %w",
			o.config, len(file.Drivers), errdefs.ErrInvalidArgument)
	}
	drivers := file.Drivers
	if len(drivers) == 0 && set {
		drivers = []configfile.Driver{{}}
	}
	var list []crust.Driver
	for _, d := range drivers {
		list = append(list, crust.Driver{
			Endpoint: o.text("endpoint", o.driver.Endpoint, d.Endpoint),
			Upstream: o.text("driver-endpoint", o.driver.Upstream, d.Upstream),
			Register: o.truth("register", o.driver.Register, d.Register),
		})
	}
	if len(list) == 0 || list[0].Upstream == "" {
		return nil, fmt.Errorf("no driver is configured; say with --driver-endpoint, or in the file under drivers, where its CSI socket is: %w", errdefs.ErrInvalidArgument)
	}
	return list, nil
}

func (o *options) kubernetes(k *configfile.Kubernetes) *crust.Kubernetes {
	if k == nil && o.kubeconfig == "" {
		return nil
	}
	if k == nil {
		k = &configfile.Kubernetes{}
	}
	return &crust.Kubernetes{
		Kubeconfig: o.text("kubeconfig", o.kubeconfig, k.Kubeconfig),
		Node:       cmp.Or(o.text("node", o.node, k.Node), os.Getenv("NODE_NAME")),
	}
}

func (o *options) level(file *configfile.File) (slog.Level, error) {
	return command.ParseLevel(o.text("log-level", o.logLevel, file.Log.Level))
}

// text is the flag's value if it is set, or else the file's if that has one, or else the flag's default.
func (o *options) text(flag, value, inFile string) string {
	if o.flags.Changed(flag) {
		return value
	}
	return cmp.Or(inFile, value)
}

func (o *options) truth(flag string, value, inFile bool) bool {
	if o.flags.Changed(flag) {
		return value
	}
	return inFile
}

// socketPath is the path of an endpoint; what is wrong with one is told elsewhere.
func socketPath(endpoint string) string {
	path, _ := rpc.ParseEndpoint(endpoint)
	return path
}
