package main

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/qemu/image"
	"crust.dev/crust/runtimehandler/sandbox"
	"crust.dev/crust/runtimehandler/shim"
)

func runCommand(o *options) *cobra.Command {
	var (
		config    sandbox.Config
		endpoint  string
		imageDir  string
		accel     string
		probeFile string
		mounts    []string
	)
	cmd := &cobra.Command{
		Use:   "run --id ID --mount source=TARGET-PATH,destination=/DIR",
		Short: "Run a microVM until it is stopped",
		Long: `run boots a microVM, mounts deferred volumes in it, and stays in the foreground until it gets SIGTERM or SIGINT; then the
guest unmounts everything and the volumes are given back. When all mounts are in place it says so on standard output.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if config.Log, err = o.logging.Logger(os.Stderr); err != nil {
				return err
			}
			config.Root = o.root
			if config.RuntimeSocket, err = rpc.ParseEndpoint(endpoint); err != nil {
				return err
			}
			for _, m := range mounts {
				mount, err := parseMount(m)
				if err != nil {
					return err
				}
				config.Mounts = append(config.Mounts, mount)
			}
			if config.VM.Image, err = image.Load(imageDir); err != nil {
				return err
			}
			probe := qemu.Probe{Want: accel, Image: config.VM.Image, Cache: probeFile, Log: config.Log}
			if config.VM.Accel, err = qemu.ProbeAccel(cmd.Context(), probe); err != nil {
				return err
			}
			s, err := sandbox.New(config)
			if err != nil {
				return err
			}
			return s.Run(cmd.Context(), func(info sandbox.Info) { printReady(cmd, o.output, info) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&config.ID, "id", "", "the sandbox's name, unique on the node (required)")
	flags.StringVar(&endpoint, "runtime-endpoint", "unix:///run/crust/runtime.sock", "crustd's socket for shims")
	flags.StringVar(&imageDir, "image", defaultImageDir, "directory with the guest's image; see crust-sandbox image")
	flags.StringArrayVar(&mounts, "mount", nil, "source=TARGET-PATH,destination=DIR[,ro]; may be repeated")
	flags.IntVar(&config.VM.MemoryMiB, "memory", qemu.DefaultMemoryMiB, "memory of the guest in MiB")
	flags.IntVar(&config.VM.CPUs, "cpus", qemu.DefaultCPUs, "processors of the guest")
	flags.StringVar(&accel, "accel", "auto", "kvm, tcg, or auto: KVM if it really runs a guest here")
	flags.StringVar(&probeFile, "accel-cache", defaultAccelCache, "where auto notes what it has found")
	if err := cmd.MarkFlagRequired("id"); err != nil {
		panic(err) // the flag is declared above
	}
	return cmd
}

// parseMount reads a mount as container engines write it: comma-separated fields, quoted as in CSV.
func parseMount(text string) (shim.Mount, error) {
	fields, err := csv.NewReader(strings.NewReader(text)).Read()
	if err != nil {
		return shim.Mount{}, fmt.Errorf("--mount %q: %w", text, err)
	}
	m := shim.Mount{Type: "bind"}
	for _, field := range fields {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "type":
			m.Type = value
		case "source", "src":
			m.Source = value
		case "destination", "dst", "target":
			m.Destination = filepath.Clean(value)
		case "ro", "readonly":
			m.Options = append(m.Options, "ro")
		default:
			return shim.Mount{}, fmt.Errorf("--mount %q: unknown field %q; want source, destination, ro", text, key)
		}
	}
	return m, nil
}

func printReady(cmd *cobra.Command, output string, info sandbox.Info) {
	if output == "json" {
		raw, err := json.Marshal(info)
		if err != nil {
			panic(err) // the type is ours
		}
		fmt.Fprintln(cmd.OutOrStdout(), string(raw))
		return
	}
	fmt.Fprintf(cmd.OutOrStdout(), "sandbox %s is ready (%s); run a command in it with: crust-sandbox exec %s -- sh\n", info.ID, info.Accel, info.ID)
}
