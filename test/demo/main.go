// Demo shows the whole path once, with nothing faked: a CSI client in the kubelet's place publishes a volume through
// crustd, a microVM makes, mounts, measures and grows its filesystem, and the host never mounts it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"crust.dev/crust/test/node"
)

func main() {
	bin := flag.String("bin", "bin", "directory of the commands, as `make build` leaves it")
	dir := flag.String("dir", "/var/tmp", "where to make a directory for the run; its filesystem must allow direct I/O")
	asJSON := flag.Bool("json", false, "one JSON object per step instead of a table")
	keep := flag.Bool("keep", false, "leave the directory with the logs even if all went well")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, *bin, *dir, *keep, newReport(os.Stdout, *asJSON))
	stop()
	os.Exit(code)
}

// run plays the demo and returns the exit code.
func run(ctx context.Context, bin, dir string, keep bool, report *report) int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "demo: loop devices and the pool's own mount need root; run this as root")
		return 1
	}
	n, err := node.New(bin, dir)
	if err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		return 1
	}
	played := play(ctx, n, report)
	closed := n.Close()
	if played == nil {
		// After a failure, or an interruption, a process may end as badly as it likes as long as it is gone.
		closed = errors.Join(closed, n.Ended())
	}
	if err := errors.Join(closed, node.Leftovers(n.Dir)); err != nil {
		report.failed("clean-up", err)
	} else if played == nil {
		_ = report.step(context.WithoutCancel(ctx), "", "nothing is left behind: no process, mount, loop device or file", func(context.Context) (string, error) {
			if keep {
				return n.Dir, nil
			}
			return "", os.RemoveAll(n.Dir)
		})
	}
	if report.interrupted && report.failures == 0 {
		if err := os.RemoveAll(n.Dir); err != nil {
			report.failed("clean-up", err)
		}
	}
	report.end()
	switch {
	case report.failures > 0 || played != nil && !report.interrupted:
		fmt.Fprintf(os.Stderr, "demo: look at the logs in %s (crustd.log, crust-csi.log, sandbox-*.log)\n", filepath.Join(n.Dir, "logs"))
		return 1
	case report.interrupted:
		return 130
	}
	return 0
}
