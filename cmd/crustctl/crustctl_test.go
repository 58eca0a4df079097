package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/cmd/internal/command"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/protocol/rpc"
)

var update = flag.Bool("update", false, "write what is printed into testdata")

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

// daemon answers as a crustd with two volumes would.
type daemon struct {
	adminv1.UnimplementedAdminServer
	empty bool
}

func deferrals() []*adminv1.Deferral {
	return []*adminv1.Deferral{
		{
			TargetPath: "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/pvc-1/mount", Driver: "a.example", VolumeId: "vol-1", Phase: "mounted", Handler: "remote",
			Device: "/pool/vol-1.img", SizeBytes: 10 << 30, FsType: "xfs", MountFlags: []string{"noatime"}, SupplementalGroup: "2000", Created: ago(50 * time.Hour),
			Pod:     &adminv1.Pod{Uid: "u-1", Namespace: "shop", Name: "db-0"},
			Sandbox: &adminv1.Sandbox{Id: "s-1", Runtime: "crust-sandbox", Address: "/run/s-1", Pids: []int64{7, 8}, Since: ago(49 * time.Hour), BootId: "b"},
		},
		{
			TargetPath: "/var/lib/kubelet/pods/u-2/volumes/kubernetes.io~csi/pvc-2/mount", Driver: "a.example", VolumeId: "vol\x1b[2J", Phase: "published", Handler: "kata",
			Device: "/pool/vol-2.img", SizeBytes: 1536 << 20, FsType: "ext4", ReadOnly: true, Created: ago(90 * time.Second), Pod: &adminv1.Pod{Uid: "u-2"}, ExpandingBytes: 2 << 30,
		},
	}
}

func (d daemon) ListDeferrals(context.Context, *adminv1.ListDeferralsRequest) (*adminv1.ListDeferralsResponse, error) {
	if d.empty {
		return &adminv1.ListDeferralsResponse{}, nil
	}
	return &adminv1.ListDeferralsResponse{Deferrals: deferrals()}, nil
}

func stats() *adminv1.Stats {
	return &adminv1.Stats{Bytes: &adminv1.Usage{Total: 10 << 30, Used: 4 << 30, Available: 6 << 30}, Inodes: &adminv1.Usage{Total: 1000, Used: 10, Available: 990}}
}

func (daemon) GetDeferral(_ context.Context, req *adminv1.GetDeferralRequest) (*adminv1.GetDeferralResponse, error) {
	switch req.GetName() {
	case "vol-1":
		return &adminv1.GetDeferralResponse{Deferral: deferrals()[0], Sealed: true, Stats: stats(), Holders: []string{"process 8 (qemu)"}}, nil
	case "u-2":
		return &adminv1.GetDeferralResponse{
			Deferral: deferrals()[1], StatsError: "no sandbox has mounted it yet",
			Findings: []*adminv1.Finding{{Kind: "resealed", Path: deferrals()[1].GetTargetPath(), VolumeId: "vol-2", Text: "its seal was gone"}},
		}, nil
	}
	return nil, fmt.Errorf("no deferral is called %s; see crustctl list: %w", req.GetName(), errdefs.ErrNotFound)
}

func (d daemon) ListStats(_ context.Context, req *adminv1.ListStatsRequest) (*adminv1.ListStatsResponse, error) {
	list := deferrals()
	good := &adminv1.DeferralStats{TargetPath: list[0].GetTargetPath(), VolumeId: "vol-1", Pod: list[0].GetPod(), Phase: "mounted", Stats: stats()}
	waiting := &adminv1.DeferralStats{TargetPath: list[1].GetTargetPath(), VolumeId: "vol-2", Pod: list[1].GetPod(), Phase: "published", Error: "no sandbox has mounted it yet"}
	hung := &adminv1.DeferralStats{TargetPath: "/t", VolumeId: "vol-3", Pod: list[0].GetPod(), Phase: "mounted", Error: "no answer in time"}
	bad := &adminv1.DeferralStats{TargetPath: "/u", VolumeId: "vol-4", Pod: list[0].GetPod(), Phase: "mounted", Stats: stats()}
	bad.Stats.Abnormal, bad.Stats.Message = true, "the filesystem has been remounted read-only"
	switch strings.Join(req.GetNames(), " ") {
	case "":
		return &adminv1.ListStatsResponse{Stats: []*adminv1.DeferralStats{good, waiting, bad}}, nil
	case "vol-2":
		return &adminv1.ListStatsResponse{Stats: []*adminv1.DeferralStats{waiting}}, nil
	}
	return &adminv1.ListStatsResponse{Stats: []*adminv1.DeferralStats{good, hung}}, nil
}

func (daemon) ExpandDeferral(_ context.Context, req *adminv1.ExpandDeferralRequest) (*adminv1.ExpandDeferralResponse, error) {
	if !req.GetDryRun() {
		return nil, fmt.Errorf("volume %s: the guest is too old: %w", req.GetName(), errdefs.ErrFailedPrecondition)
	}
	return &adminv1.ExpandDeferralResponse{DeviceBytes: 10 << 30, FilesystemBytes: 8 << 30, Plan: "sandbox s-1 grows it"}, nil
}

func (d daemon) Reconcile(_ context.Context, req *adminv1.ReconcileRequest) (*adminv1.ReconcileResponse, error) {
	if d.empty {
		return &adminv1.ReconcileResponse{}, nil
	}
	text := "its pod's directory is gone"
	if !req.GetDryRun() {
		text += ", and now the volume"
	}
	return &adminv1.ReconcileResponse{Findings: []*adminv1.Finding{{Kind: "orphaned", Path: "/t", VolumeId: "vol-1", Text: text}}}, nil
}

func (daemon) GetStatus(context.Context, *adminv1.GetStatusRequest) (*adminv1.GetStatusResponse, error) {
	return &adminv1.GetStatusResponse{
		Version: "v1", Started: ago(10 * time.Minute), ConfigFile: "/etc/crust/crustd.yaml", StateDir: "/var/lib/crust", RuntimeEndpoint: "/run/crust/runtime.sock",
		DefaultPolicy: "never", DefaultHandler: "remote",
		Checks:   []*adminv1.Check{{Name: "driver", Ok: true}, {Name: "kubernetes", Message: "no answer"}},
		Drivers:  []*adminv1.Driver{{Name: "a.example", Endpoint: "/run/a.sock", Upstream: "/run/b.sock"}},
		Handlers: []*adminv1.Handler{{Name: "remote", RuntimeClasses: []string{"vm", "kata"}, Capabilities: []string{"format", "grow"}}},
	}, nil
}

// serve serves a daemon and returns its endpoint.
func serve(t *testing.T, d adminv1.AdminServer) string {
	t.Helper()
	return serveAt(t, "admin.sock", func(server *grpc.Server) { adminv1.RegisterAdminServer(server, d) })
}

// serveAt serves on a socket of the given name until the test ends, and returns its endpoint.
func serveAt(t *testing.T, name string, register func(*grpc.Server)) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ctl-") // t.TempDir would be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l, err := rpc.Listen(ctx, filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	server := rpc.NewServer(ctx, slog.New(slog.DiscardHandler))
	register(server)
	done := make(chan error, 1)
	go func() { done <- rpc.ServeGRPC(ctx, server, l, time.Second) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	return "unix://" + l.Addr().String()
}

// crustctl runs the command and returns what it prints and how it ends.
func crustctl(endpoint string, args ...string) (string, error) {
	var out bytes.Buffer
	cmd := newCommand(&options{now: func() time.Time { return now }})
	cmd.SetArgs(completable(endpoint, args))
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	err := cmd.ExecuteContext(context.Background())
	return out.String(), err
}

// completable adds the endpoint where it is not in the way of completion, which is about the last word.
func completable(endpoint string, args []string) []string {
	if args[0] == cobra.ShellCompRequestCmd {
		return append([]string{args[0], "--admin-endpoint", endpoint}, args[1:]...)
	}
	return append(args, "--admin-endpoint", endpoint)
}

func exitCode(err error) int {
	var exit *command.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.Code
	}
	return 1
}

func TestOutput(t *testing.T) {
	full, empty := serve(t, daemon{}), serve(t, daemon{empty: true})
	for _, row := range []struct {
		file, endpoint, args string
		code                 int
	}{
		{"list", full, "list", 0},
		{"list-wide", full, "list -o wide", 0},
		{"list-json", full, "list -o json", 0},
		{"list-yaml", full, "list -o yaml", 0},
		{"list-empty", empty, "list", 0},
		{"list-empty-json", empty, "list -o json", 0},
		{"describe", full, "describe vol-1", 0},
		{"describe-broken", full, "describe u-2", 0},
		{"describe-json", full, "describe vol-1 -o json", 0},
		{"stats", full, "stats", 0},
		{"stats-wide", full, "stats -o wide", 0},
		{"stats-hung", full, "stats vol-1 vol-3", 1},
		{"stats-waiting", full, "stats vol-2", 1},
		{"expand-dry-run", full, "expand vol-1 --dry-run", 0},
		{"gc", full, "gc", 0},
		{"gc-dry-run", full, "gc --dry-run", 0},
		{"gc-empty", empty, "gc", 0},
		{"status", full, "status", 0},
		{"status-json", full, "status -o json", 0},
	} {
		t.Run(row.file, func(t *testing.T) {
			got, err := crustctl(row.endpoint, strings.Fields(row.args)...)
			if exitCode(err) != row.code {
				t.Errorf("exit code %d, want %d: %v", exitCode(err), row.code, err)
			}
			path := filepath.Join("testdata", row.file+".txt")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestErrorsSayWhatToDoNext(t *testing.T) {
	endpoint := serve(t, daemon{})
	old := serve(t, adminv1.UnimplementedAdminServer{})
	for name, row := range map[string]struct {
		endpoint string
		args     []string
		want     string
	}{
		"crustd is down":     {"unix:///nonexistent/admin.sock", []string{"list"}, "is it running? crustctl doctor finds out what is wrong"},
		"no such volume":     {endpoint, []string{"describe", "x"}, "no deferral is called x; see crustctl list"},
		"a refusal":          {endpoint, []string{"expand", "vol-1"}, "volume vol-1: the guest is too old"},
		"no name":            {endpoint, []string{"describe"}, "accepts 1 arg(s), received 0"},
		"a wrong format":     {endpoint, []string{"list", "-o", "xml"}, "want one of table, wide, json, yaml"},
		"a wrong endpoint":   {"tcp://x", []string{"list"}, `--admin-endpoint: endpoint "tcp://x": want unix:///absolute/path`},
		"doctor needs one":   {"x", []string{"doctor"}, "--admin-endpoint: "},
		"an unknown command": {endpoint, []string{"lst"}, "Did you mean this?\n\tlist"},
		"no time":            {endpoint, []string{"list", "--timeout", "1ns"}, "has not answered in time"},
		"an older crustd":    {old, []string{"stats"}, "is older than this command"},
	} {
		out, err := crustctl(row.endpoint, row.args...)
		if exitCode(err) != 1 || !strings.Contains(err.Error(), row.want) || out != "" {
			t.Errorf("%s: got %q, %v, want %s", name, out, err, row.want)
		}
	}
}

func TestDoctor(t *testing.T) {
	root := t.TempDir()
	t.Run("crustd is down", func(t *testing.T) {
		out, err := crustctl("unix:///nonexistent/admin.sock", "doctor", "--root", root)
		if exitCode(err) != 1 || !strings.Contains(out, "[error]   crustd: crustd does not answer on /nonexistent/admin.sock") || !strings.Contains(out, "\n          cure: start crustd") {
			t.Errorf("%v\n%s", err, out)
		}
	})
	t.Run("crustd runs", func(t *testing.T) {
		out, err := crustctl(serve(t, daemon{}), "doctor", "--root", root, "-o", "json")
		if exitCode(err) != 1 || !strings.Contains(out, `"what": "kubernetes: no answer"`) || strings.Contains(out, "does not answer") {
			t.Errorf("%v\n%s", err, out)
		}
	})
}

func TestCompletion(t *testing.T) {
	out, err := crustctl(serve(t, daemon{}), cobra.ShellCompRequestCmd, "describe", "")
	// The id of the second volume cannot be typed.
	want := "vol-1\tshop/db-0\n/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/pvc-1/mount\tvol-1\nshop/db-0\tvol-1\n" +
		"/var/lib/kubelet/pods/u-2/volumes/kubernetes.io~csi/pvc-2/mount\tvol\\x1b[2J\n:4\n"
	if err != nil || out != want {
		t.Errorf("%v\n%q, want\n%q", err, out, want)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, err := crustctl("/x", "completion", shell); err != nil || !strings.Contains(out, "crustctl") {
			t.Errorf("%s: %v", shell, err)
		}
	}
	if out, _ := crustctl("/x", cobra.ShellCompRequestCmd, "list", "-o", ""); !strings.HasPrefix(out, "table\nwide\njson\nyaml\n") {
		t.Errorf("formats: %q", out)
	}
}
