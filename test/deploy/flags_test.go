package deploy_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// programs builds our commands once for all tests, and returns their directory.
var programs = sync.OnceValues(func() (string, error) {
	// As make build does, so that nothing is compiled twice.
	cmd := exec.Command("go", "build", "-trimpath", "-o", programsDir, "./cmd/crustd", "./cmd/crust-csi", "./cmd/crustctl")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return programsDir, nil
})

// programsDir is for the tests of one run.
var programsDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "crust-deploy-")
	if err != nil {
		panic(err)
	}
	programsDir = dir
	code := m.Run()
	_ = os.RemoveAll(dir) // it is in the directory for temporary files
	os.Exit(code)
}

var flagPattern = regexp.MustCompile(`(?m)^\s*(?:-\w, )?--?([a-z][a-z0-9-]*)`)

// helps are the answers to --help, by command.
var helps sync.Map

// help is what a command answers to --help. Words are its name and subcommands.
func help(t *testing.T, words ...string) string {
	t.Helper()
	key := strings.Join(words, " ")
	if text, ok := helps.Load(key); ok {
		return text.(string)
	}
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(dir, words[0]), append(slices.Clone(words[1:]), "--help")...).Output()
	if err != nil {
		t.Fatalf("%s --help: %v", key, err)
	}
	helps.Store(key, string(out))
	return string(out)
}

// flagsOf are the flags that a command has.
func flagsOf(t *testing.T, words ...string) []string {
	t.Helper()
	var list []string
	for _, m := range flagPattern.FindAllStringSubmatch(help(t, words...), -1) {
		list = append(list, m[1])
	}
	return list
}

// checkArgs checks that a command of ours has the flags that it is called with.
func checkArgs(t *testing.T, where string, argv []string) {
	t.Helper()
	words := []string{argv[0]}
	for _, arg := range argv[1:] {
		if strings.HasPrefix(arg, "-") || argv[0] == "crustd" || argv[0] == "crust-csi" || len(words) > 2 {
			break
		}
		if arg != strings.ToLower(arg) || !regexp.MustCompile(`^[a-z-]+$`).MatchString(arg) || !subcommand(t, append(slices.Clone(words), arg)) {
			break
		}
		words = append(words, arg)
	}
	known := flagsOf(t, words...)
	for _, arg := range argv[1:] {
		name, ok := strings.CutPrefix(arg, "--")
		name, _, _ = strings.Cut(name, "=")
		if ok && !slices.Contains(known, name) {
			t.Errorf("%s: %s has no flag --%s; it has %v", where, strings.Join(words, " "), name, known)
		}
	}
}

// subcommand says whether words are a command: its usage begins with them.
func subcommand(t *testing.T, words []string) bool {
	t.Helper()
	return regexp.MustCompile(`(?m)^\s+` + regexp.QuoteMeta(strings.Join(words, " ")) + `( |$)`).MatchString(help(t, words...))
}

// sidecarFlags are those flags of Kubernetes' sidecars that we use, read from their sources at the versions that the chart
// has. What they do is tested where they run.
var sidecarFlags = map[string][]string{
	"csi-provisioner":       {"csi-address", "node-deployment", "strict-topology", "immediate-topology", "extra-create-metadata", "enable-capacity", "capacity-ownerref-level", "timeout", "v"},
	"csi-snapshotter":       {"csi-address", "node-deployment", "leader-election", "leader-election-namespace", "timeout", "http-endpoint", "feature-gates"},
	"csi-resizer":           {"csi-address", "leader-election", "leader-election-namespace", "timeout", "http-endpoint", "handle-volume-inuse-error"},
	"csi-snapshot-metadata": {"csi-address", "tls-cert", "tls-key", "port", "max-streaming-duration-min", "http-endpoint"},
}

// TestFlags: whatever a container is started with is there.
func TestFlags(t *testing.T) {
	for name, values := range valueSets {
		t.Run(name, func(t *testing.T) {
			for owner, pod := range pods(render(t, values)) {
				for _, c := range pod.Spec.Containers {
					checkContainer(t, owner+"/"+c.Name, c)
				}
			}
		})
	}
}

func checkContainer(t *testing.T, where string, c corev1.Container) {
	t.Helper()
	if len(c.Command) > 0 {
		checkArgs(t, where, append(slices.Clone(c.Command), c.Args...))
		for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
			if p != nil && p.Exec != nil {
				checkArgs(t, where, p.Exec.Command)
			}
		}
		return
	}
	known, ok := sidecarFlags[c.Name]
	if !ok {
		t.Errorf("%s is neither ours nor a sidecar that we know", where)
	}
	for _, arg := range c.Args {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if !slices.Contains(known, name) {
			t.Errorf("%s: the flag --%s is not among those that were looked up", where, name)
		}
	}
}
