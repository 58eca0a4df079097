// Setup brings a Debian machine to the point where the demo and the tests run: it installs missing packages and unpacks
// a kernel for the guests. Without root it changes nothing and prints what to do.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
)

// need is a Debian package, and how to see that it is there without asking dpkg (another distribution may have it under
// another name).
type need struct {
	pkg  string
	file []string // one of them must exist
	tool string   // or this must be found
}

// demoNeeds are what the demo needs, commonNeeds what all tests need beyond that, and testNeeds and clusterNeeds what one kind
// of them needs beyond both.
var (
	demoNeeds = []need{
		{pkg: "qemu-system-x86", tool: "qemu-system-x86_64"},
		{pkg: "e2fsprogs", tool: "mkfs.ext4"},
		{pkg: "xfsprogs", tool: "mkfs.xfs"},
		{pkg: "util-linux", tool: "blkid"},
		{pkg: "mount", tool: "mount"},
		{pkg: "dpkg", tool: "dpkg-deb"},
	}
	commonNeeds = []need{
		{pkg: "qemu-utils", tool: "qemu-img"}, // backing images
		{pkg: "openssl", tool: "openssl"},     // the documents' commands
	}
	testNeeds = []need{
		{pkg: "gcc", tool: "gcc"}, // go test -race
		{pkg: "libc6-dev", file: []string{"/usr/include/stdlib.h"}},
		{pkg: "btrfs-progs", tool: "mkfs.btrfs"},
		{pkg: "cryptsetup-bin", tool: "cryptsetup"},
	}
	clusterNeeds = []need{
		{pkg: "runc", tool: "runc"},
		{pkg: "containernetworking-plugins", file: []string{"/usr/lib/cni/loopback"}},
		{pkg: "busybox-static", file: []string{"/bin/busybox"}}, // the containers' image
		{pkg: "skopeo", tool: "skopeo"},                         // docs/install.md copies the image with it
	}
)

func main() {
	test := flag.Bool("test", false, "also what the tests need")
	cluster := flag.Bool("cluster", false, "also what the one-node Kubernetes needs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	needs := demoNeeds
	if *test || *cluster {
		needs = append(needs, commonNeeds...)
	}
	if *test {
		needs = append(needs, testNeeds...)
	}
	if *cluster {
		needs = append(needs, clusterNeeds...)
	}
	if err := run(ctx, needs); err != nil {
		fmt.Fprintf(os.Stderr, "setup: %v\n", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, needs []need) error {
	missing := missing(needs)
	kernel, err := kernelDir()
	if err != nil {
		return err
	}
	haveKernel := hasKernel(kernel)
	if len(missing) == 0 && haveKernel {
		return nil
	}
	if os.Geteuid() != 0 {
		return errors.New(instructions(missing, kernel, haveKernel))
	}
	if err := command(ctx, "", "apt-get", "update", "-qq"); err != nil {
		return err
	}
	if len(missing) > 0 {
		fmt.Printf("setup: installing %s\n", strings.Join(missing, " "))
		args := append([]string{"install", "-qq", "-y", "--no-install-recommends"}, missing...)
		if err := command(ctx, "", "apt-get", args...); err != nil {
			return err
		}
	}
	if !haveKernel {
		return unpackKernel(ctx, kernel)
	}
	return nil
}

func missing(needs []need) []string {
	var missing []string
	for _, n := range needs {
		if n.present() {
			continue
		}
		missing = append(missing, n.pkg)
	}
	return missing
}

func (n need) present() bool {
	if n.tool != "" {
		for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
			if info, err := os.Stat(filepath.Join(dir, n.tool)); err == nil && !info.IsDir() {
				return true
			}
		}
	}
	for _, f := range n.file {
		if _, err := os.Stat(f); err == nil {
			return true
		}
	}
	return false
}

func instructions(missing []string, kernel string, haveKernel bool) string {
	var b strings.Builder
	b.WriteString("something is missing. Run this again as root, or run as root:\n")
	if len(missing) > 0 {
		fmt.Fprintf(&b, "  apt-get install --no-install-recommends %s\n", strings.Join(missing, " "))
	}
	if !haveKernel {
		fmt.Fprintf(&b, "  cd /tmp && apt-get download %s\n", "$("+dependsCommand+")")
		fmt.Fprintf(&b, "  dpkg-deb -x /tmp/linux-image-*-cloud-amd64_*.deb %s\n", kernel)
	}
	return strings.TrimRight(b.String(), "\n")
}

// command runs a command and shows its output only if it fails.
func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
