package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "crust.dev/crust/"

// pkg is what `go list -json` says of a package.
type pkg struct {
	ImportPath   string
	Dir          string
	Doc          string
	GoFiles      []string
	TestGoFiles  []string
	XTestGoFiles []string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,GoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports", module+"...")
	cmd.Dir = "../.."
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		pkgs = append(pkgs, p)
	}
}

// rule says what the packages under a path may import of ours. The first rule that fits a package holds.
type rule struct {
	from string
	to   []string
	why  string
}

var rules = []rule{
	{"cmd", []string{"cmd", "crust", "csiplugin", "runtimehandler", "protocol"}, "a command may use everything but tests"},
	{"crust", []string{"crust", "runtimehandler:exact", "protocol"}, "the daemon knows runtimes only through runtimehandler.Handler, and drivers only over their socket"},
	{"csiplugin", []string{"csiplugin", "protocol"}, "the plugin talks to the daemon over a socket"},
	{"runtimehandler/sandbox", []string{"runtimehandler", "protocol"}, "it puts the other parts of our own runtime together"},
	{"runtimehandler/containerdshim", []string{"runtimehandler", "protocol"}, "it puts the other parts of our own runtime together, for containerd"},
	{"runtimehandler/qemu", []string{"runtimehandler/qemu", "runtimehandler:exact", "protocol"}, "a runtime's parts are independent"},
	{"runtimehandler/guest", []string{"runtimehandler/guest", "runtimehandler:exact", "protocol"}, "the guest has nothing of the host"},
	{"runtimehandler/kata/assist", []string{"runtimehandler/guest/filesystem", "runtimehandler/guest/ownership", "runtimehandler/guest/command"}, "what the host does in a guest's place it does as our guest would, and it knows nothing else"},
	{"runtimehandler/*", []string{"runtimehandler:exact", "protocol"}, "a handler stands for itself"},
	{"runtimehandler", []string{"protocol"}, "the contract knows no implementation"},
	{"protocol", []string{"protocol"}, "the protocol knows nobody"},
	{"test", []string{"test", "cmd", "crust", "csiplugin", "runtimehandler", "protocol", "deploy"}, "tests may use everything"},
	{"deploy", []string{"deploy"}, "what is shipped is data"},
}

// testsMayImport are packages that tests of any package may use.
var testsMayImport = []string{"test/halt", "test/priv", "test/vm", "test/kata", "runtimehandler/kata", "runtimehandler/kata/assist", "runtimehandler/kata/config", "runtimehandler/handlertest", "runtimehandler/fake", "runtimehandler/cli", "runtimehandler/remote", "runtimehandler/shim"}

func TestImports(t *testing.T) {
	for _, p := range list(t) {
		r := ruleFor(t, p.ImportPath)
		for _, imp := range p.Imports {
			check(t, p.ImportPath, imp, r, nil)
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			check(t, p.ImportPath, imp, r, testsMayImport)
		}
	}
}

func ruleFor(t *testing.T, path string) rule {
	t.Helper()
	for _, r := range rules {
		if prefix, ok := strings.CutSuffix(r.from, "/*"); ok {
			if strings.HasPrefix(path, prefix+"/") {
				// A handler may import what is beneath it.
				name, _, _ := strings.Cut(strings.TrimPrefix(path, prefix+"/"), "/")
				r.to = append(slices.Clone(r.to), prefix+"/"+name)
				return r
			}
			continue
		}
		if within(path, r.from) {
			return r
		}
	}
	t.Fatalf("package %s is in none of the top-level directories", path)
	return rule{}
}

func check(t *testing.T, from, imp string, r rule, also []string) {
	t.Helper()
	cri := within(from, "runtimehandler/kata/cri") && within(imp, "k8s.io/cri-api")
	uninstall := from == "cmd/crustctl" || within(from, "cmd/crustctl/internal/uninstall") // it looks at a cluster and at no node
	if strings.HasPrefix(imp, "k8s.io/") && !cri && !uninstall && !within(from, "crust/internal/kube") && !within(from, "csiplugin") && !within(from, "test") {
		t.Errorf("%s imports %s: Kubernetes' libraries are for crust/internal/kube, csiplugin, crustctl uninstall-check and test, and CRI's for runtimehandler/kata/cri", from, imp)
	}
	ours, ok := strings.CutPrefix(imp, module)
	if !ok || ours == from || slices.Contains(also, ours) {
		return
	}
	for _, to := range r.to {
		if exact, ok := strings.CutSuffix(to, ":exact"); ok && ours == exact || !ok && within(ours, to) {
			return
		}
	}
	t.Errorf("%s imports %s: %s", from, ours, r.why)
}

func within(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }
