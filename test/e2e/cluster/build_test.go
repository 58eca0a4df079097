package cluster

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/mod/modfile"
)

// TestSidecarsShareWithKubernetes checks the versions that make the sidecars cheap to build: what they have in common with
// Kubernetes is the same source.
func TestSidecarsShareWithKubernetes(t *testing.T) {
	kubernetes, sidecars := versions(t, "kubernetes"), versions(t, "sidecars")
	shared := 0
	for path, want := range kubernetes {
		got, ok := sidecars[path]
		switch {
		case !ok || path == "github.com/container-storage-interface/spec": // each has the one that it compiles with
		case got != want:
			t.Errorf("%s: sidecars have %s, Kubernetes has %s; say so with replace in modules/sidecars/go.mod", path, got, want)
		default:
			shared++
		}
	}
	if shared < 50 {
		t.Errorf("only %d modules are in common", shared)
	}
}

// versions are those that a module file chooses, by the path of the module.
func versions(t *testing.T, module string) map[string]string {
	t.Helper()
	name := filepath.Join("modules", module, "go.mod")
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	file, err := modfile.Parse(name, raw, nil)
	if err != nil {
		t.Fatal(err)
	}
	chosen := map[string]string{}
	for _, r := range file.Require {
		chosen[r.Mod.Path] = r.Mod.Version
	}
	for _, r := range file.Replace {
		if _, ok := chosen[r.Old.Path]; ok {
			chosen[r.Old.Path] = r.New.Version
		}
	}
	return chosen
}
