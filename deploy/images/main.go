// Command images builds the container image of crustd, crust-csi and crustctl with the tools that they run, for several
// architectures, without a container engine and without root. Our programs are cross-built; the tools are taken out of Debian's
// packages, each with the libraries that it is linked to, its package's copyright, and nothing else.
//
//	images -o bin/images --name registry.example.com/storage/crust-node:0.1.0
//
// The result is an OCI archive with one index, and for each architecture a bill of materials (CycloneDX), which is in the
// archive, too, as an artifact that refers to its image. All programs are beside it, by architecture. The same sources and packages give the same bytes.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"crust.dev/crust/deploy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	c := config{programs: []string{"crustd", "crust-csi", "crustctl"}, beside: []string{"crust-sandbox", "crust-agent", "containerd-shim-crust-v2"}, tools: tools, log: os.Stderr}
	flags := pflag.NewFlagSet("images", pflag.ContinueOnError)
	flags.StringVarP(&c.out, "output", "o", "bin/images", "directory for the archive, the programs, and the bills of materials")
	flags.StringVar(&c.name, "name", "", "name of the image, with its tag (default crust-node: and the version of the chart)")
	flags.StringVar(&c.version, "version", "", "version of the programs (default that of the chart)")
	flags.StringSliceVar(&c.arches, "arch", []string{"amd64", "arm64"}, "architectures, by the names that Go and Debian have for them")
	flags.StringVar(&c.cache, "cache", "", "directory that keeps packages between runs (default crust/images in the user's cache)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for _, arch := range c.arches {
		if _, ok := triplets[arch]; !ok {
			return fmt.Errorf("--arch %s: want amd64 or arm64", arch)
		}
	}
	if c.version == "" {
		chart, err := deploy.Chart()
		if err != nil {
			return err
		}
		c.version = chart.AppVersion()
	}
	if c.name == "" {
		c.name = "crust-node:" + c.version
	}
	if base := c.name[strings.LastIndex(c.name, "/")+1:]; !strings.Contains(base, ":") || strings.HasSuffix(base, ":") || strings.Contains(base, "@") {
		return fmt.Errorf("--name %q: want a name with a tag, like registry.example.com/storage/crust-node:%s", c.name, c.version)
	}
	if c.cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("no directory for the cache: %w; name one with --cache", err)
		}
		c.cache = filepath.Join(base, "crust", "images")
	}
	slices.Sort(c.arches)
	_, err := c.build(ctx)
	return err
}
