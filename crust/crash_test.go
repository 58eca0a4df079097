package crust_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/internal/journal"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/cli"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/remote"
	"crust.dev/crust/runtimehandler/shim"
)

// daemonEnv makes the test binary a daemon: its value is an order.
const daemonEnv = "CRUST_TEST_DAEMON"

// order is what a child has to do: serve, and kill itself in the At-th place after it was armed.
type order struct {
	Config orderedConfig
	CLI    string // root directory of the cli handler
	Armed  string // the file that arms it
	At     int
}

// orderedConfig is the part of a configuration that can be written down.
type orderedConfig struct {
	Drivers                                               []crust.Driver
	RuntimeEndpoint, KEPEndpoint, AdminEndpoint, StateDir string
	DeviceRoots                                           []string
	ShimHandler, DefaultHandler                           string
}

func runDaemon(text string) {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	c := o.Config
	daemon, err := crust.New(crust.Config{
		Drivers: c.Drivers, RuntimeEndpoint: c.RuntimeEndpoint, KEPEndpoint: c.KEPEndpoint, AdminEndpoint: c.AdminEndpoint, StateDir: c.StateDir,
		DeviceRoots: c.DeviceRoots, ShimHandler: c.ShimHandler, DefaultHandler: c.DefaultHandler, Handlers: handlers(o.CLI),
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var mu sync.Mutex
	err = daemon.Run(crashpoint.With(ctx, func(place string) {
		if _, err := os.Stat(o.Armed); err != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if o.At--; o.At == -1 {
			fmt.Println(place)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func handlers(cliRoot string) []runtimehandler.Handler {
	h, err := cli.New(cli.Config{Root: cliRoot, Capabilities: runtimehandler.Capabilities{Format: true, Group: true, OnlineExpand: true}})
	if err != nil {
		panic(err)
	}
	k, err := kata.New(kata.Config{Root: kataRoot(cliRoot), HostAssist: []assist.Step{assist.Format, assist.Grow}, ProofTimeout: time.Millisecond})
	if err != nil {
		panic(err)
	}
	return []runtimehandler.Handler{remote.Handler{}, h, k}
}

// kataRoot is where Kata's part of the node's filesystem is.
func kataRoot(cliRoot string) string { return cliRoot + "-kata" }

// startChild runs the daemon in a process of its own that dies in the at-th place. The context ends when it does; the
// function ends it, and says where it has died.
func (n *node) startChild(at int) (ctx context.Context, end func() (place string)) {
	n.t.Helper()
	n.stop()
	armed := n.path("armed")
	c := n.config
	config := orderedConfig{
		Drivers: c.Drivers, RuntimeEndpoint: c.RuntimeEndpoint, KEPEndpoint: c.KEPEndpoint, AdminEndpoint: c.AdminEndpoint, StateDir: c.StateDir,
		DeviceRoots: c.DeviceRoots, ShimHandler: c.ShimHandler, DefaultHandler: c.DefaultHandler,
	}
	text, err := json.Marshal(order{Config: config, CLI: n.path("run"), Armed: armed, At: at})
	if err != nil {
		n.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), daemonEnv+"="+string(text))
	cmd.Stderr = n.log
	out, err := cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	ctx, died := context.WithTimeout(n.t.Context(), time.Minute)
	place := make(chan string, 1)
	go func() {
		scanner := bufio.NewScanner(out)
		scanner.Scan()
		place <- scanner.Text()
		_ = cmd.Wait()
		died()
	}()
	n.stop = func() { _ = cmd.Process.Kill(); <-ctx.Done() }
	n.listening()
	if err := os.WriteFile(armed, nil, 0o600); err != nil {
		n.t.Fatal(err)
	}
	return ctx, func() string {
		_ = os.Remove(armed)
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ctx.Done()
		n.stop = func() {}
		return <-place
	}
}

// world is all that a call can have changed.
type world struct {
	Records   []journal.Record
	Published map[string]string
	Seals     map[string]bool // of all target paths that exist
	Files     []string        // what the cli handler has put out
	GuestSize int64
}

// world stops the daemon and looks at everything. Times and processes are not compared.
func (n *node) world(s *sandbox) world {
	n.t.Helper()
	n.stop()
	j, err := journal.Open(n.path("state", "journal.db"))
	if err != nil {
		n.t.Fatal(err)
	}
	defer j.Close()
	w := world{Published: map[string]string{}, Seals: map[string]bool{}}
	for _, rec := range j.List(nil) {
		rec.Created, rec.Request, rec.Deferral.Serial = time.Time{}, "", "" // digests of paths
		if rec.Binding != nil {
			rec.Binding.Since, rec.Binding.Processes = time.Time{}, nil
		}
		raw, err := json.Marshal(rec)
		if err != nil {
			n.t.Fatal(err)
		}
		var plain journal.Record
		if err := json.Unmarshal([]byte(n.plain(string(raw))), &plain); err != nil {
			n.t.Fatal(err)
		}
		w.Records = append(w.Records, plain)
	}
	for target, id := range n.driver.Published() {
		w.Published[n.plain(target)] = id
	}
	targets, err := filepath.Glob(n.path("pods", "*", "volumes", "*", "*", "*"))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, target := range targets {
		w.Seals[n.plain(target)] = sealed(target)
	}
	for _, dir := range []string{n.path("run"), kataRoot(n.path("run"))} {
		if err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				w.Files = append(w.Files, d.Name())
			}
			return nil
		}); err != nil {
			n.t.Fatal(err)
		}
	}
	if s != nil {
		w.GuestSize = s.deviceSize()
	}
	return w
}

// plain takes what differs between two nodes out of a text.
func (n *node) plain(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(text, n.dir, "DIR"), n.driver.Dir, "DRIVER")
}

// operation is one call, with what goes before it. call is repeated until it succeeds, as a kubelet or a shim does.
type operation struct {
	name    string
	prepare func(n *node) *sandbox
	call    func(ctx context.Context, n *node, s *sandbox) error
}

// operations are all that change anything.
func operations() []operation {
	publish := func(ctx context.Context, n *node, _ *sandbox) error {
		_, err := n.csi().NodePublishVolume(ctx, publishRequest("v1", n.target("pod1")))
		return err
	}
	publishCLI := func(ctx context.Context, n *node, _ *sandbox) error {
		req := publishRequest("v1", n.target("pod1"))
		req.VolumeContext["crust.dev/handler"] = "cli"
		_, err := n.csi().NodePublishVolume(ctx, req)
		return err
	}
	publishKata := func(ctx context.Context, n *node, _ *sandbox) error {
		_, err := n.csi().NodePublishVolume(ctx, kataRequest("v1", n.target("pod1")))
		return err
	}
	onHost := func(ctx context.Context, n *node, _ *sandbox) error {
		_, err := n.csi().NodePublishVolume(ctx, hostRequest("v1", n.target("pod1")))
		return err
	}
	unpublish := func(ctx context.Context, n *node, _ *sandbox) error {
		_, err := n.csi().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: "v1", TargetPath: n.target("pod1")})
		return err
	}
	claim := func(ctx context.Context, n *node, s *sandbox) error {
		_, err := s.client.Resolve(ctx, []shim.Mount{{Source: n.target("pod1")}})
		return err
	}
	mount := func(ctx context.Context, n *node, s *sandbox) error {
		_, err := s.mount(ctx, n.target("pod1"))
		return err
	}
	expand := func(ctx context.Context, n *node, _ *sandbox) error {
		_, err := n.csi().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
			VolumeId: "v1", VolumePath: n.target("pod1"), CapacityRange: &csi.CapacityRange{RequiredBytes: 128 << 20},
		})
		return err
	}
	overKEP := func(call func(ctx context.Context, n *node, c runtimev1.RuntimeClient) error) func(context.Context, *node, *sandbox) error {
		return func(ctx context.Context, n *node, _ *sandbox) error {
			conn, err := rpc.Dial(n.path("kep.sock"))
			if err != nil {
				return err
			}
			defer conn.Close()
			return call(ctx, n, runtimev1.NewRuntimeClient(conn))
		}
	}
	stage := overKEP(func(ctx context.Context, n *node, c runtimev1.RuntimeClient) error {
		_, err := c.RuntimeStageVolume(ctx, &runtimev1.RuntimeStageVolumeRequest{
			VolumeType: runtimev1.VolumeType_VOLUME_TYPE_BLOCK, VolumeTargetPath: n.target("pod1"), FsType: "ext4", VolumeBackingPath: filepath.Join(n.driver.Dir, "v1.img"),
		})
		return err
	})
	unstage := overKEP(func(ctx context.Context, n *node, c runtimev1.RuntimeClient) error {
		_, err := c.RuntimeUnstageVolume(ctx, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: n.target("pod1")})
		return err
	})
	nothing := func(context.Context, *node, *sandbox) error { return nil }
	after := func(before ...func(context.Context, *node, *sandbox) error) func(n *node) *sandbox {
		return func(n *node) *sandbox {
			n.driver.OnHost = mountTmpfs
			n.driver.Volume(n.t, "v1", 64<<20)
			s := n.sandbox("s1", nil)
			for _, call := range before {
				if err := call(n.t.Context(), n, s); err != nil {
					n.t.Fatal(err)
				}
			}
			return s
		}
	}
	release := func(ctx context.Context, n *node, s *sandbox) error { return s.client.Released(ctx, n.target("pod1")) }
	return []operation{
		{"publish", after(nothing), publish},
		{"publish for a command-line runtime", after(nothing), publishCLI},
		{"publish for Kata", after(nothing), publishKata},
		{"publish on the host", after(nothing), onHost},
		{"claim", after(publish), claim},
		{"report as bound", after(publish, claim), mount},
		{"expand in a sandbox", after(publish, mount), expand},
		{"expand before a sandbox", after(publish), expand},
		{"release", after(publish, mount), release},
		{"unpublish what was never mounted", after(publish), unpublish},
		{"unpublish what was mounted", after(publish, mount, release), unpublish},
		{"unpublish from a command-line runtime", after(publishCLI), unpublish},
		{"unpublish from Kata", after(publishKata), unpublish},
		{"expand before a Kata sandbox", after(publishKata), expand},
		{"unpublish on the host", after(onHost), unpublish},
		{"RuntimeStageVolume", after(nothing), stage},
		{"RuntimeUnstageVolume", after(stage), unstage},
	}
}

// TestKill kills the daemon in every place of every operation, starts it again, repeats the call as its caller would, and
// compares the world with that of an undisturbed run.
func TestKill(t *testing.T) {
	places := 0
	for _, op := range operations() {
		t.Run(op.name, func(t *testing.T) {
			n := newNode(t)
			s := op.prepare(n)
			if err := op.call(t.Context(), n, s); err != nil {
				t.Fatal(err)
			}
			want := n.world(s)
			for at := 0; ; at++ {
				n := newNode(t)
				s := op.prepare(n)
				ctx, end := n.startChild(at)
				err := op.call(ctx, n, s)
				place := end()
				if place == "" {
					if err != nil {
						t.Fatalf("undisturbed, the call failed: %v", err)
					}
					break
				}
				places++
				n.start()
				eventually(t, "the repeated call, after a kill at: "+place, func() error { return op.call(t.Context(), n, s) })
				if diff := cmp.Diff(want, n.world(s)); diff != "" {
					t.Errorf("killed at %q, the world is another one: -want +got\n%s", place, diff)
				}
			}
		})
	}
	t.Logf("the daemon was killed in %d places", places)
	if places < 40 {
		t.Errorf("only %d places: crash points are missing", places)
	}
}

// TestKillAndNobodyCalls kills the daemon in every place of publishing and unpublishing; the kubelet never calls again, and
// the pod's directory goes. Nothing may be left.
func TestKillAndNobodyCalls(t *testing.T) {
	for _, op := range operations() {
		if op.name != "publish" && op.name != "unpublish what was mounted" && op.name != "publish for a command-line runtime" && op.name != "publish for Kata" && op.name != "unpublish from Kata" {
			continue
		}
		t.Run(op.name, func(t *testing.T) {
			for at := 0; ; at++ {
				n := newNode(t)
				s := op.prepare(n)
				ctx, end := n.startChild(at)
				_ = op.call(ctx, n, s)
				place := end()
				if place == "" {
					break
				}
				n.unmount() // as a reboot would, and the kubelet after it
				if err := os.RemoveAll(n.path("pods", "pod1")); err != nil {
					t.Fatal(err)
				}
				n.start()
				// What was forgotten before the kill leaves nothing to reconcile.
				eventually(t, "everything to be given back after a kill at: "+place, func() error {
					log := n.log.String()
					for _, kind := range []string{"kind=undone", "kind=finished", "kind=orphaned"} {
						if strings.Contains(log, kind) {
							return nil
						}
					}
					if place == "take back: forgotten" {
						return nil
					}
					return errors.New("nothing was reconciled")
				})
				w := n.world(s)
				if len(w.Records) > 0 || len(w.Files) > 0 || len(w.Seals) > 0 {
					t.Errorf("killed at %q, there is left: %+v", place, w)
				}
			}
		})
	}
}
