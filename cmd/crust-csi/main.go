// Command crust-csi is the CSI plugin: it serves the volumes of one storage pool on this node.
//
//	crust-csi --endpoint unix:///run/crust/csi.sock --node-id NODE --pool /var/lib/crust/pool
//
// A pool whose catalog was lost is rebuilt, while nobody serves it, with
//
//	crust-csi repair --pool /var/lib/crust/pool
//
// On a cluster, sidecars of which there is only one reach all nodes' plugins through
//
//	crust-csi --mode=router --endpoint unix:///csi/csi.sock --route-cert FILE --route-key FILE --route-ca FILE
//
// which has no pool and needs no rights. Whether the one that serves a socket answers, says
//
//	crust-csi probe --endpoint unix:///csi/csi.sock
//
// A node's plugin needs CAP_SYS_ADMIN for mounts and loop devices, CAP_SYS_RESOURCE to grow mounted ext4 filesystems, and CAP_CHOWN,
// CAP_FOWNER and CAP_LEASE, and CAP_LINUX_IMMUTABLE to protect snapshots; the tools mkfs.ext4, mkfs.xfs, blkid, fsck, mount,
// resize2fs and xfs_growfs on its PATH; and /proc of the host's pid namespace if its messages are to name who uses a volume.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/backing/convert"
)

// version is set when a release is built (-ldflags "-X main.version=...").
var version = ""

func main() {
	convert.Main()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "crust-csi:", err)
		os.Exit(1)
	}
}

// run is main without the process around it.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	}
	if err != nil {
		return err
	}
	if o.version {
		_, err := fmt.Fprintln(stdout, "crust-csi", o.config.Version)
		return err
	}
	if o.repair {
		return repair(ctx, o, stdout, stderr)
	}
	if o.probe {
		return probe(ctx, o.config.Endpoint)
	}
	if o.config.Log, err = logger(stderr, o.logLevel, o.logFormat); err != nil {
		return err
	}
	if o.config.Mode == modeRouter {
		return route(ctx, o)
	}
	plugin, err := csiplugin.New(o.config)
	if err != nil {
		return err
	}
	return plugin.Run(ctx)
}

type options struct {
	config              csiplugin.Config
	logLevel, logFormat string
	version             bool
	repair, probe       bool
	routePort           int
	kubeconfig          string
}

// parse reads the command line. For --help it prints what there is and returns flag.ErrHelp.
func parse(args []string, stdout io.Writer) (options, error) {
	o := options{config: csiplugin.Config{Version: programVersion()}}
	flags := flag.NewFlagSet("crust-csi", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are the caller's to print
	flags.Usage = func() {}
	help := func() {
		flags.SetOutput(stdout)
		fmt.Fprintln(stdout, "usage: crust-csi --node-id ID --pool DIR [flags]\n       crust-csi --mode=router [flags]\n       crust-csi repair --pool DIR\n       crust-csi probe --endpoint SOCKET\n\nThe CSI plugin for the volumes of one storage pool on this node.\n\nflags:")
		flags.PrintDefaults()
	}
	flags.StringVar(&o.config.Endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "`socket` to serve on, unix:///path (default: $CSI_ENDPOINT)")
	flags.StringVar(&o.config.NodeID, "node-id", "", "`id` of this node as the CO knows it")
	flags.StringVar(&o.config.PoolDir, "pool", "", "`directory` of the pool, with the same path on the host")
	flags.StringVar((*string)(&o.config.Mode), "mode", string(csiplugin.ModeAll), "what to be: all, controller or node, by the services that are served, or router")
	flags.StringVar(&o.config.DriverName, "driver-name", csiplugin.DefaultDriverName, "`name` of the driver")
	flags.Var((*size)(&o.config.PoolSize), "pool-size", "`size` of the image that a pool is made with where the directory's filesystem is neither XFS with reflink nor btrfs,\nin bytes or with Ki, Mi, Gi or Ti (default: half of the free space, at least 1Gi)")
	flags.StringVar(&o.config.Crustd, "crustd-endpoint", "", "`socket` of the node daemon (its --kep-endpoint), unix:///path, which freezes filesystems in sandboxes for snapshots (default: none)")
	flags.Var((*size)(&o.config.MetadataBlock), "snapshot-metadata-block-size", "`size` of the ranges that the SnapshotMetadata service reports, a power of two from 4Ki to 1Gi (default: 0, as they are)")
	imageFlags(flags, &o.config.Images)
	routeFlags(flags, &o)
	flags.StringVar(&o.config.Metrics, "metrics-address", "", "`host:port` on which to serve /metrics (default: nowhere)")
	flags.StringVar(&o.logLevel, "log-level", "info", "least `level` that is logged: debug, info, warn or error")
	flags.StringVar(&o.logFormat, "log-format", "text", "`format` of the log: text or json")
	flags.BoolVar(&o.version, "version", false, "print the version and exit")
	if len(args) > 0 && (args[0] == "repair" || args[0] == "probe") {
		o.repair, o.probe, args = args[0] == "repair", args[0] == "probe", args[1:]
	}
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			help()
		}
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return o, nil
}

// programVersion is that of the release, or else what the build knows of the source.
func programVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
