package arch

import (
	"bufio"
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// maxLines is the length of a hand-written file from which on it needs a reason in longFiles.
const maxLines = 600

var longFiles = map[string]string{}

// vagueNames say nothing of what is in a package.
var vagueNames = []string{"util", "utils", "common", "helpers", "helper", "types", "misc", "shared", "base"}

func TestPackages(t *testing.T) {
	for _, p := range list(t) {
		if p.Doc == "" && len(p.GoFiles) > 0 {
			t.Errorf("package %s has no documentation; write a doc.go: what it owns, what it never does, how to use it", p.ImportPath)
		}
		if slices.Contains(vagueNames, filepath.Base(p.ImportPath)) {
			t.Errorf("package %s: name it for what it has", p.ImportPath)
		}
	}
}

func TestFiles(t *testing.T) {
	for _, path := range tracked(t) {
		if !strings.HasSuffix(path, ".go") {
			continue
		}
		src, err := os.ReadFile(filepath.Join("../..", path))
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, src, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if ast.IsGenerated(file) {
			continue
		}
		if n := bytes.Count(src, []byte("\n")); n > maxLines && longFiles[path] == "" {
			t.Errorf("%s has %d lines; split it by what its parts are about, or give a reason in longFiles", path, n)
		}
		for _, decl := range file.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				t.Errorf("%s has an init function; make what it does a call", path)
			}
		}
	}
}

func TestModule(t *testing.T) {
	src, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if regexp.MustCompile(`(?m)^replace\b`).Match(src) {
		t.Error("go.mod has a replace directive; nobody who imports the module would see it")
	}
}

// TestLinks checks that what the documentation links to in this repository is there.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]+)(?:#[^)]*)?\)`)
	for _, path := range tracked(t) {
		if !strings.HasSuffix(path, ".md") {
			continue
		}
		src, err := os.ReadFile(filepath.Join("../..", path))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllSubmatch(src, -1) {
			to := string(m[1])
			if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join("../..", filepath.Dir(path), to)); err != nil {
				t.Errorf("%s links to %s: %v", path, to, err)
			}
		}
	}
}

// tracked lists the files that git knows or would add.
func tracked(t *testing.T) []string {
	t.Helper()
	cmd := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	var files []string
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		if _, err := os.Stat(filepath.Join("../..", s.Text())); err == nil {
			files = append(files, s.Text())
		}
	}
	return files
}
