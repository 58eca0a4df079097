package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"crust.dev/crust/cmd/internal/command"
	"crust.dev/crust/crust"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// load reads a command line, and a file if text is not empty.
func load(t *testing.T, text string, args ...string) (crust.Config, error) {
	t.Helper()
	if text != "" {
		args = append(args, "--config", writeConfig(t, text))
	}
	o := &options{}
	cmd := newCommandWith(o)
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	return o.load(io.Discard)
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "crustd.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func defaults() crust.Config {
	return crust.Config{
		Drivers:         []crust.Driver{{Endpoint: "unix:///run/crust/csi.sock", Upstream: "unix:///run/x.sock"}},
		RuntimeEndpoint: "unix:///run/crust/runtime.sock",
		AdminEndpoint:   "unix:///run/crust/admin.sock",
		RegistrationDir: "/var/lib/kubelet/plugins_registry",
		StateDir:        "/var/lib/crust",
		ShimHandler:     "remote",
		DefaultHandler:  "remote",
		DefaultPolicy:   "never",
		Version:         command.Version(),
	}
}

func TestFlagsFileAndDefaults(t *testing.T) {
	t.Setenv("NODE_NAME", "from-environment")
	const drivers = "drivers:\n- {endpoint: unix:///run/a.sock, upstream: unix:///run/x.sock, register: true}\n"
	for name, row := range map[string]struct {
		file   string
		args   []string
		want   func(*crust.Config)
		levels slog.Level
	}{
		"flags alone": {"", []string{"--driver-endpoint", "unix:///run/x.sock"}, func(*crust.Config) {}, slog.LevelInfo},
		"all flags": {"", []string{
			"--endpoint", "unix:///run/a.sock", "--driver-endpoint", "unix:///run/x.sock", "--register", "--runtime-endpoint", "unix:///t/rt.sock",
			"--kep-endpoint", "unix:///t/k.sock", "--http-address", ":1", "--profiling", "--registration-dir", "/r", "--state-dir", "/s",
			"--default-policy", "auto", "--kubeconfig", "/k", "--node", "n", "--log-level", "debug",
		}, func(c *crust.Config) {
			c.Drivers = []crust.Driver{{Endpoint: "unix:///run/a.sock", Upstream: "unix:///run/x.sock", Register: true}}
			c.RuntimeEndpoint, c.KEPEndpoint, c.AdminEndpoint = "unix:///t/rt.sock", "unix:///t/k.sock", "unix:///t/admin.sock"
			c.HTTPAddress, c.Profiling, c.RegistrationDir, c.StateDir = ":1", true, "/r", "/s"
			c.DefaultPolicy, c.Kubernetes = "auto", &crust.Kubernetes{Kubeconfig: "/k", Node: "n"}
		}, slog.LevelDebug},
		"a file alone": {drivers + `
runtimeEndpoint: unix:///t/rt.sock
kepEndpoint: unix:///t/k.sock
http: {address: ":1", profiling: true}
registrationDir: /r
stateDir: /s
deviceRoots: [/dev]
policy: {default: auto}
kubernetes: {}
runtimeClasses: {kata: remote}
log: {level: warn}
`, nil, func(c *crust.Config) {
			c.Drivers = []crust.Driver{{Endpoint: "unix:///run/a.sock", Upstream: "unix:///run/x.sock", Register: true}}
			c.RuntimeEndpoint, c.KEPEndpoint, c.AdminEndpoint = "unix:///t/rt.sock", "unix:///t/k.sock", "unix:///t/admin.sock"
			c.HTTPAddress, c.Profiling, c.RegistrationDir, c.StateDir, c.DeviceRoots = ":1", true, "/r", "/s", []string{"/dev"}
			c.DefaultPolicy, c.Kubernetes, c.RuntimeClasses = "auto", &crust.Kubernetes{Node: "from-environment"}, map[string]string{"kata": "remote"}
		}, slog.LevelWarn},
		"flags count for more": {drivers + "stateDir: /s\nlog: {level: warn}\nhttp: {address: ':1', profiling: true}\nadminEndpoint: unix:///t/a.sock\n",
			[]string{"--endpoint", "unix:///run/b.sock", "--register=false", "--state-dir", "/z", "--log-level", "error", "--profiling=false", "--admin-endpoint="},
			func(c *crust.Config) {
				c.Drivers[0].Endpoint, c.StateDir, c.HTTPAddress, c.AdminEndpoint = "unix:///run/b.sock", "/z", ":1", ""
			}, slog.LevelError},
		"no admin socket": {drivers + "adminEndpoint: ''\n", []string{"--endpoint", "unix:///run/crust/csi.sock", "--register=false"}, func(c *crust.Config) { c.AdminEndpoint = "" }, slog.LevelInfo},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := load(t, row.file, row.args...)
			if err != nil {
				t.Fatal(err)
			}
			if got.LogLevel.Level() != row.levels {
				t.Errorf("log level %v, want %v", got.LogLevel.Level(), row.levels)
			}
			if (got.File != nil) != (row.file != "") {
				t.Errorf("file %v", got.File)
			}
			want := defaults()
			row.want(&want)
			if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(crust.Config{}, "Handlers", "Log", "LogLevel", "File")); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if _, err := crust.New(got); err != nil {
				t.Errorf("the daemon refuses it: %v", err)
			}
		})
	}
}

func TestHandlers(t *testing.T) {
	const drivers = "drivers: [{endpoint: /run/crust/a.sock, upstream: /run/x.sock}]\n"
	c, err := load(t, drivers+`
handlers:
- kind: remote
- kind: cli
  name: kep
  root: /run/crust
  timeout: 3s
  capabilities: [format, check, grow, online-expand, group, subpath]
- kind: kata
  name: kata-go
  runtime: go
  hostAssist: [format]
`)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]runtimehandler.Capabilities{
		"remote":  {Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true, Freeze: true},
		"kep":     {Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true},
		"kata-go": {Format: true, Group: true},
	}
	got := map[string]runtimehandler.Capabilities{}
	for _, h := range c.Handlers {
		got[h.Name()] = h.Capabilities()
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	t.Run("the daemon's own files are no strangers in a handler's directory", func(t *testing.T) {
		want := []string{"sandboxes", "accel.json", "a.sock", "runtime.sock", "admin.sock"}
		if diff := cmp.Diff(want, ours("/run/crust", c)); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
	})
	for name, row := range map[string]struct{ text, want string }{
		"an unknown kind":      {"handlers:\n- kind: vmm\n", `crustd.yaml:3: kind: "vmm": want one of cli, kata, remote`},
		"an unknown setting":   {"handlers:\n- kind: remote\n  root: /x\n", `crustd.yaml:4: unknown key "handlers[0].root"; there are no settings`},
		"a name":               {"handlers:\n- kind: remote\n  name: x\n", `crustd.yaml:4: name: a handler of kind remote is always called remote`},
		"an unknown ability":   {"handlers:\n- kind: cli\n  capabilities: [fly]\n", `crustd.yaml:4: capabilities: "fly": want format,`},
		"a relative root":      {"handlers:\n- kind: cli\n  root: x\n", `crustd.yaml:3: handler cli: root "x" must be absolute`},
		"an unknown runtime":   {"handlers:\n- kind: kata\n  runtime: c\n", `crustd.yaml:3: handler kata: runtime "c"`},
		"an unknown step":      {"handlers:\n- kind: kata\n  hostAssist: [fly]\n", `crustd.yaml:3: handler kata: hostAssist "fly"`},
		"a wrong kata setting": {"handlers:\n- kind: kata\n  criEndpint: x\n", `crustd.yaml:4: unknown key "handlers[0].criEndpint"; did you mean "criEndpoint"?`},
	} {
		_, err := load(t, drivers+row.text)
		if !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: got %v, want %s", name, err, row.want)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	for name, row := range map[string]struct {
		file string
		args []string
		want string
	}{
		"nothing":           {"", nil, "no driver is configured; say with --driver-endpoint"},
		"no such file":      {"", []string{"--config", "/nonexistent/crustd.yaml"}, "/nonexistent/crustd.yaml: no such file"},
		"ambiguous flags":   {"drivers: [{endpoint: /a, upstream: /b}, {endpoint: /c, upstream: /d}]\n", []string{"--endpoint", "/e"}, "describe one driver, and"},
		"an unknown level":  {"", []string{"--driver-endpoint", "/x", "--log-level", "loud"}, `--log-level "loud": want debug`},
		"an unknown format": {"", []string{"--driver-endpoint", "/x", "--log-format", "xml"}, `--log-format "xml": want text or json`},
	} {
		if _, err := load(t, row.file, row.args...); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: got %v, want %s", name, err, row.want)
		}
	}
}

func TestCheckConfig(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	paths := func(state, socket, registry string) string {
		return fmt.Sprintf("drivers: [{endpoint: %s, upstream: %s/up.sock, register: true}]\nruntimeEndpoint: %s/run/rt.sock\nstateDir: %s\nregistrationDir: %s\n", socket, dir, dir, state, registry)
	}
	good := paths(dir+"/state", dir+"/run/csi.sock", dir)
	for name, row := range map[string]struct{ text, want string }{
		"good":                      {good, ""},
		"a state directory is none": {paths(file, dir+"/csi.sock", dir), "state directory: " + file + " is not a directory"},
		"a socket is something":     {paths(dir+"/state", file, dir), "socket " + file + ": there is something else"},
		"a socket beneath a file":   {paths(dir+"/state", file+"/csi.sock", dir), "directory of socket " + file + "/csi.sock: "},
		"no registration directory": {paths(dir+"/state", dir+"/csi.sock", dir+"/none"), "registration directory: stat " + dir + "/none: no such file"},
		"no kubeconfig":             {good + "kubernetes: {kubeconfig: " + dir + "/none, node: n}\n", "kubernetes: "},
		"no name of a node":         {good + "kubernetes: {kubeconfig: " + file + "}\n", "the name of the node is needed"},
		"classes without a handler": {good + "runtimeClasses: {kata: x}\n", `handler of RuntimeClass handler kata "x" is none of the handlers (remote)`},
		"auto without pods":         {good + "policy: {default: auto}\n", "policy: default auto needs to know pods"},
		"profiling without a port":  {good + "http: {profiling: true}\n", "profiling is on, but there is no HTTP address"},
		"a line of the file":        {good + "x: 1\n", `crustd.yaml:5: unknown key "x"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("NODE_NAME", "")
			var out bytes.Buffer
			cmd := newCommand()
			cmd.SetArgs([]string{"--check-config", "--config", writeConfig(t, row.text)})
			cmd.SetOut(&out)
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			err := cmd.Execute()
			switch {
			case row.want == "" && err != nil:
				t.Errorf("got %v", err)
			case row.want == "":
				if !strings.HasPrefix(out.String(), "the configuration is valid\n  driver unix://"+dir) && !strings.Contains(out.String(), "handler remote") {
					t.Errorf("it says\n%s", &out)
				}
			case err == nil || !strings.Contains(err.Error(), row.want):
				t.Errorf("got %v, want %s", err, row.want)
			}
			if _, err := os.Stat(dir + "/state"); err == nil {
				t.Error("the check has made the state directory")
			}
		})
	}
}

// TestReload runs the daemon as the command would, and changes its file as people and Kubernetes do.
func TestReload(t *testing.T) {
	dir, err := os.MkdirTemp("", "crustd-") // t.TempDir would be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	text := func(more string) string {
		return fmt.Sprintf("drivers: [{endpoint: %[1]s/csi.sock, upstream: %[1]s/up.sock}]\nruntimeEndpoint: %[1]s/rt.sock\nstateDir: %[1]s/state\n%[2]s", dir, more)
	}
	// As in a ConfigMap: the file is a link through a link that is replaced.
	version := 0
	write := func(content string) {
		t.Helper()
		version++
		data := filepath.Join(dir, "etc", fmt.Sprint("v", version))
		for _, err := range []error{
			os.MkdirAll(data, 0o700),
			os.WriteFile(filepath.Join(data, "crustd.yaml"), []byte(content), 0o600),
			os.Symlink(data, filepath.Join(dir, "etc", "..tmp")),
			os.Rename(filepath.Join(dir, "etc", "..tmp"), filepath.Join(dir, "etc", "..data")),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	write(text("runtimeClasses: {one: remote}\n"))
	path := filepath.Join(dir, "etc", "crustd.yaml")
	if err := os.Symlink("..data/crustd.yaml", path); err != nil {
		t.Fatal(err)
	}
	log := &logBuffer{}
	admin := run(t, path, dir, log)

	for _, step := range []struct {
		name, content, classes, problem, logged string
	}{
		{"what it was started with", "", "one", "", ""},
		{"other classes and a log level", text("runtimeClasses: {one: remote, two: remote}\nlog: {level: debug}\n"), "one two", "", "log level DEBUG"},
		{"a misspelt key", text("runtimeClases: {three: remote}\n"), "one two", `crustd.yaml:4: unknown key "runtimeClases"; did you mean "runtimeClasses"?`, "not in force"},
		{"half a file", "drivers: [", "one two", "this is not YAML", ""},
		{"a class of no handler", text("runtimeClasses: {three: none}\n"), "one two", `"none" is none of the handlers`, ""},
		{"a policy that cannot be had", text("policy: {default: auto}\n"), "one two", "needs to know pods", ""},
		{"what needs a restart, and what does not", text("runtimeClasses: {four: remote}\nkepEndpoint: " + dir + "/k.sock\nlog: {format: json}\n"), "four",
			"kepEndpoint, log.format: changed since crustd was started; restart it", ""},
		{"a handler that needs a restart, and a class of it", text("handlers: [{kind: remote}, {kind: cli}]\nruntimeClasses: {five: cli}\n"), "four",
			"handlers: changed since crustd was started; restart it", ""},
		{"the first again", text("runtimeClasses: {one: remote}\n"), "one", "", "in force again"},
	} {
		t.Run(step.name, func(t *testing.T) {
			if step.content != "" {
				write(step.content)
			}
			eventually(t, func() error { return compare(admin, step.classes, step.problem, path) })
			if !strings.Contains(log.String(), step.logged) {
				t.Errorf("the log does not say %q:\n%s", step.logged, log)
			}
		})
	}
	t.Run("no file any more", func(t *testing.T) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error { return compare(admin, "one", "no such file", path) })
	})
}

// run runs the daemon until the test ends, and returns a client of it.
func run(t *testing.T, path, dir string, log io.Writer) adminv1.AdminClient {
	t.Helper()
	o := &options{}
	cmd := newCommandWith(o)
	if err := cmd.ParseFlags([]string{"--config", path}); err != nil {
		t.Fatal(err)
	}
	config, err := o.load(log)
	if err != nil {
		t.Fatal(err)
	}
	daemon, err := crust.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- daemon.Run(ctx) }()
	conn, err := rpc.Dial(filepath.Join(dir, "admin.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("daemon: %v", err)
		}
	})
	return adminv1.NewAdminClient(conn)
}

// compare says how the daemon's status differs from what is wanted.
func compare(admin adminv1.AdminClient, classes, problem, path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s, err := admin.GetStatus(ctx, &adminv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	got := strings.Join(s.GetHandlers()[0].GetRuntimeClasses(), " ")
	check := s.GetChecks()[len(s.GetChecks())-1]
	if got != classes || check.GetName() != "configuration" || check.GetOk() != (problem == "") || !strings.Contains(check.GetMessage(), problem) || s.GetConfigFile() != path {
		return fmt.Errorf("classes %q, %v, want %q, %q", got, check, classes, problem)
	}
	return nil
}

// logBuffer is a log that is read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// eventually waits until fn succeeds.
func eventually(t *testing.T, fn func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
