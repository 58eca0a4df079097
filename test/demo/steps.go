package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/test/node"
)

// The sizes of the demo in bytes.
const (
	firstSize  = 256 << 20
	secondSize = 512 << 20
	dataSize   = 64 << 20
)

// play runs all steps and stops at the first that fails.
func play(ctx context.Context, n *node.Node, r *report) error {
	for _, step := range []named{
		{"build the guest's image from the distribution's kernel", n.BuildImage},
		{"find out whether KVM really runs a guest here", n.Probe},
		{"start the CSI driver and crustd", says("client -> crustd -> crust-csi", n.StartServices)},
	} {
		if err := r.step(ctx, "", step.name, step.run); err != nil {
			return err
		}
	}
	witness, err := node.Watch()
	if err != nil {
		r.failed("watch the host's mounts", err)
		return err
	}
	defer witness.Close()
	for _, fsType := range []string{"ext4", "xfs"} {
		s := &scenario{node: n, report: r, witness: witness, volume: n.Volume("demo-"+fsType, fsType)}
		if err := s.play(ctx); err != nil {
			return err
		}
	}
	return nil
}

// scenario is the life of one volume.
type scenario struct {
	node    *node.Node
	report  *report
	witness *node.Witness
	volume  *node.Volume
	sandbox *node.Sandbox
	hash    string // of the data, as the guest computed it when it was written
}

// named is a step. What run returns is shown.
type named struct {
	name string
	run  func(ctx context.Context) (string, error)
}

// says is a step that shows a text if it succeeds.
func says(text string, run func(context.Context) error) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) { return text, run(ctx) }
}

// quietly is a step that shows nothing but its time; several parts run one after the other.
func quietly(parts ...func(context.Context) error) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		for _, part := range parts {
			if err := part(ctx); err != nil {
				return "", err
			}
		}
		return "", nil
	}
}

func (s *scenario) play(ctx context.Context) error {
	v := s.volume
	for _, step := range []named{
		{"create a volume", s.create},
		{"stage it", quietly(v.Stage)},
		{"publish it for a first pod, deferred", says("nothing is mounted on the host", s.publish("pod1"))},
		{"boot a microVM; inside: make the filesystem, mount it", s.boot("1")},
		{"look at the mount inside", s.lookInside},
		{"write 64 MiB inside and hash it there", s.write},
		{"stats through crustd show it", s.statsShow(dataSize, firstSize/2)},
		{"expand to 512 MiB while a writer runs inside", s.expand},
		{"stats through crustd show the new size", s.statsShow(dataSize, secondSize*4/5)},
		{"the hash inside is unchanged", s.unchanged},
		{"unpublishing is refused while the microVM lives", says(codes.FailedPrecondition.String(), v.UnpublishRefused)},
		{"stop the microVM", quietly(s.stop)},
		{"unpublish", quietly(v.Unpublish)},
		{"unstage", quietly(v.Unstage)},
		{"stage and publish it for a second pod", quietly(v.Stage, s.publish("pod2"))},
		{"boot a second microVM; inside: check the filesystem, mount it", s.boot("2")},
		{"find the data there, unchanged", s.unchanged},
		{"stop the second microVM", quietly(s.stop)},
		{"unpublish and unstage", quietly(v.Unpublish, v.Unstage)},
		{"the host has never mounted or looped the volume", s.neverOnHost},
		{"delete the volume", s.remove},
	} {
		if err := s.report.step(ctx, v.FSType, step.name, step.run); err != nil {
			return err
		}
	}
	return nil
}

func (s *scenario) create(ctx context.Context) (string, error) {
	if err := s.volume.Create(ctx, firstSize); err != nil {
		return "", err
	}
	return fmt.Sprintf("asked for %s, got %s", node.MiB(firstSize), node.MiB(s.volume.Size)), nil
}

func (s *scenario) publish(pod string) func(context.Context) error {
	return func(ctx context.Context) error { return s.volume.Publish(ctx, pod) }
}

func (s *scenario) boot(which string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var err error
		s.sandbox, err = s.node.StartSandbox(ctx, s.volume.FSType+"-"+which, node.Mount{Source: s.volume.Target(), Destination: "/data"})
		if err != nil {
			return "", err
		}
		return "accelerator " + s.sandbox.Accel, nil
	}
}

func (s *scenario) stop(ctx context.Context) error { return s.sandbox.Stop(ctx) }

// lookInside checks that /data is the wanted filesystem, on a virtio block device.
func (s *scenario) lookInside(ctx context.Context) (string, error) {
	out, err := s.sandbox.Sh(ctx, "cat /proc/mounts")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) > 3 && f[1] == "/data" {
			if f[2] != s.volume.FSType || !strings.HasPrefix(f[0], "/dev/vd") {
				return "", fmt.Errorf("/data is %s on %s", f[2], f[0])
			}
			return strings.Join(f[:3], " "), nil
		}
	}
	return "", errors.New("nothing is mounted at /data inside")
}

func (s *scenario) write(ctx context.Context) (string, error) {
	script := fmt.Sprintf("dd if=/dev/urandom of=/data/blob bs=1048576 count=%d conv=fsync 2>/dev/null && sha256sum /data/blob", dataSize>>20)
	var err error
	s.hash, err = s.digest(ctx, script)
	return "sha256 " + s.hash[:min(12, len(s.hash))] + "...", err
}

func (s *scenario) unchanged(ctx context.Context) (string, error) {
	// Nothing of it may come from the guest's memory.
	hash, err := s.digest(ctx, "sync; echo 3 > /proc/sys/vm/drop_caches; sha256sum /data/blob")
	if err != nil {
		return "", err
	}
	if hash != s.hash {
		return "", fmt.Errorf("the hash was %s and is %s", s.hash, hash)
	}
	return "sha256 " + hash[:12] + "...", nil
}

func (s *scenario) digest(ctx context.Context, script string) (string, error) {
	out, err := s.sandbox.Sh(ctx, script)
	if err != nil {
		return "", err
	}
	hash, _, _ := strings.Cut(out, " ")
	if len(hash) != 64 {
		return "", fmt.Errorf("sha256sum printed %q", out)
	}
	return hash, nil
}

// statsShow checks that the guest's numbers, as they come back through CSI, have at least so many bytes used and in all.
func (s *scenario) statsShow(used, total int64) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		u, err := s.volume.Stats(ctx)
		if err != nil {
			return "", err
		}
		if u.GetUsed() < used || u.GetTotal() < total || u.GetTotal() > s.volume.Size {
			return "", fmt.Errorf("used %s of %s; want at least %s of %s to %s", node.MiB(u.GetUsed()), node.MiB(u.GetTotal()), node.MiB(used), node.MiB(total), node.MiB(s.volume.Size))
		}
		return describe(u), nil
	}
}

func describe(u *csi.VolumeUsage) string {
	return fmt.Sprintf("used %s of %s", node.MiB(u.GetUsed()), node.MiB(u.GetTotal()))
}

// writer appends numbered records, each synced, until it is told to stop, and then prints how many there are.
const writer = `n=0; while [ ! -e /run/stop ]; do n=$((n+1)); echo "record $n" >> /data/log; sync /data/log; echo $n > /run/count; done; echo $n`

func (s *scenario) expand(ctx context.Context) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type end struct {
		out string
		err error
	}
	ended := make(chan end, 1)
	go func() {
		out, err := s.sandbox.Sh(ctx, "rm -f /run/stop /run/count; "+writer)
		ended <- end{out, err}
	}()
	if err := s.waitForRecords(ctx, 1); err != nil {
		return "", err
	}
	size, err := s.volume.Expand(ctx, secondSize)
	if err != nil {
		return "", err
	}
	before, err := s.records(ctx)
	if err != nil {
		return "", err
	}
	if err := s.waitForRecords(ctx, before+1); err != nil {
		return "", fmt.Errorf("the writer did not go on after the expansion: %w", err)
	}
	if _, err := s.sandbox.Sh(ctx, "touch /run/stop"); err != nil {
		return "", err
	}
	e := <-ended
	if e.err != nil {
		return "", e.err
	}
	return s.allRecords(ctx, size, strings.TrimSpace(e.out))
}

// allRecords checks that the log has every record once, in order.
func (s *scenario) allRecords(ctx context.Context, size int64, want string) (string, error) {
	out, err := s.sandbox.Sh(ctx, "cat /data/log")
	if err != nil {
		return "", err
	}
	n := 0
	for line := range strings.Lines(out) {
		n++
		if line != fmt.Sprintf("record %d\n", n) {
			return "", fmt.Errorf("line %d of the writer's log is %q", n, line)
		}
	}
	if strconv.Itoa(n) != want {
		return "", fmt.Errorf("the writer wrote %s records, the log has %d", want, n)
	}
	return fmt.Sprintf("%s, %d records written meanwhile", node.MiB(size), n), nil
}

func (s *scenario) records(ctx context.Context) (int, error) {
	out, err := s.sandbox.Sh(ctx, "cat /run/count 2>/dev/null || echo 0")
	if err != nil {
		return 0, err
	}
	if out = strings.TrimSpace(out); out == "" {
		return 0, nil // between truncation and write
	}
	return strconv.Atoi(out)
}

func (s *scenario) waitForRecords(ctx context.Context, n int) error {
	for {
		have, err := s.records(ctx)
		if err != nil || have >= n {
			return err
		}
	}
}

func (s *scenario) neverOnHost(context.Context) (string, error) {
	return "by /proc/self/mountinfo and the loop table, all the while", s.witness.Verdict(s.node.Dir)
}

// remove deletes the volume and checks that its file is gone.
func (s *scenario) remove(ctx context.Context) (string, error) {
	if err := s.volume.Delete(ctx); err != nil {
		return "", err
	}
	var left []string
	err := filepath.WalkDir(s.node.Path("pool"), func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasSuffix(d.Name(), ".img") && d.Name() != "pool.img" {
			left = append(left, path)
		}
		return err
	})
	if err != nil {
		return "", err
	}
	if len(left) > 0 {
		return "", fmt.Errorf("still in the pool: %v", left)
	}
	return "", nil
}
