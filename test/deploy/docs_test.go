package deploy_test

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/strvals"

	"crust.dev/crust/deploy"
	"crust.dev/crust/test/docs"
	"crust.dev/crust/test/priv"
)

func blocks(t *testing.T) []docs.Block {
	t.Helper()
	list, err := docs.Blocks("../../docs")
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func document(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestDocumentedObjects are such that an API server takes them, and values such that the chart does.
func TestDocumentedObjects(t *testing.T) {
	classes := map[string]bool{}
	for _, o := range render(t, `snapshots: {enabled: true}`) {
		classes[o.kind()+" "+o.meta().GetName()] = true
	}
	seen := 0
	for _, b := range blocks(t) {
		switch b.Info {
		case "yaml":
			seen += len(decode(t, b.Document, b.Text))
			for _, m := range regexp.MustCompile(`(?m)(storageClass|volumeSnapshotClass)Name: (\S+)`).FindAllStringSubmatch(b.Text, -1) {
				if kind := strings.ToUpper(m[1][:1]) + m[1][1:]; !classes[kind+" "+m[2]] {
					t.Errorf("%s: the chart makes no %s %s", b.Document, kind, m[2])
				}
			}
		case "yaml values":
			if _, err := deploy.Render("crust-system", parse(t, b.Text)); err != nil {
				t.Errorf("%s: %v", b.Document, err)
			}
			seen++
		case "sh", "sh run", "mermaid":
		default:
			t.Errorf("%s: a block of the unknown kind %q", b.Document, b.Info)
		}
	}
	if seen < 5 {
		t.Errorf("only %d objects were found", seen)
	}
}

// TestDocumentedCommands have the flags that they are written with, and speak of what there is.
func TestDocumentedCommands(t *testing.T) {
	seen := map[string]int{}
	for _, b := range blocks(t) {
		if !b.IsCommands() {
			continue
		}
		for line := range strings.Lines(b.Text) {
			argv := words(line)
			if len(argv) == 0 {
				continue
			}
			seen[argv[0]]++
			where := b.Document + ": " + strings.TrimSpace(line)
			switch argv[0] {
			case "crustctl", "crust-csi":
				checkArgs(t, where, argv)
			case "helm":
				checkHelm(t, where, argv)
			case "kubectl":
				checkKubectl(t, where, argv)
			case "make":
				if makefile := string(read(t, "../../Makefile")); !strings.Contains(makefile, "\n"+argv[1]+": ") {
					t.Errorf("%s: the Makefile has no %s", where, argv[1])
				}
			case "openssl": // run below
			case "skopeo", "ctr", "chattr", "rm":
			default:
				t.Errorf("%s: who is %s?", where, argv[0])
			}
		}
	}
	for _, program := range []string{"helm", "kubectl", "crustctl", "openssl", "make"} {
		if seen[program] == 0 {
			t.Errorf("no %s was found", program)
		}
	}
}

// words splits a line as a shell does that is given nothing difficult.
func words(line string) (list []string) {
	for _, m := range regexp.MustCompile(`"([^"]*)"|(\S+)`).FindAllStringSubmatch(line, -1) {
		list = append(list, m[1]+m[2])
	}
	return list
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// checkFlags checks that a command has only flags of a list; those that end in = take a value. It returns the other
// arguments, and the values by flag.
func checkFlags(t *testing.T, where string, argv, known []string) (rest []string, values map[string][]string) {
	t.Helper()
	values = map[string][]string{}
	for i := 0; i < len(argv); i++ {
		name, ok := strings.CutPrefix(argv[i], "--")
		if !ok || name == "" {
			rest = append(rest, argv[i])
			continue
		}
		name, value, given := strings.Cut(name, "=")
		takes := slices.Contains(known, name+"=")
		switch {
		case !takes && !slices.Contains(known, name):
			t.Errorf("%s: unknown flag --%s", where, name)
		case takes && !given && i+1 == len(argv):
			t.Errorf("%s: --%s takes a value", where, name)
		case takes && !given:
			i++
			value = argv[i]
		}
		values[name] = append(values[name], value)
	}
	return rest, values
}

func checkHelm(t *testing.T, where string, argv []string) {
	t.Helper()
	flags, ok := map[string][]string{
		"install":   {"namespace=", "create-namespace", "set=", "values="},
		"upgrade":   {"namespace=", "reset-then-reuse-values", "set=", "values="},
		"rollback":  {"namespace="},
		"uninstall": {"namespace=", "no-hooks"},
	}[argv[1]]
	if !ok {
		t.Fatalf("%s: helm %s", where, argv[1])
	}
	rest, values := checkFlags(t, where, argv[2:], flags)
	if rest[0] != "crust" || values["namespace"] == nil || values["namespace"][0] != "crust-system" {
		t.Errorf("%s: the release is crust in crust-system", where)
	}
	if len(rest) > 1 && rest[1] != "deploy/helm/crust" {
		t.Errorf("%s: the chart is in deploy/helm/crust", where)
	}
	set := map[string]any{}
	for _, s := range values["set"] {
		if err := strvals.ParseInto(s, set); err != nil {
			t.Errorf("%s: %v", where, err)
		}
	}
	if _, err := deploy.Render("crust-system", set); err != nil {
		t.Errorf("%s: %v", where, err)
	}
}

func checkKubectl(t *testing.T, where string, argv []string) {
	t.Helper()
	argv, inside := argv[1:], []string(nil)
	if i := slices.Index(argv, "--"); i >= 0 {
		argv, inside = argv[:i], argv[i+1:]
	}
	rest, values := checkFlags(t, where, argv, []string{
		"namespace=", "filename=", "container=", "for=", "timeout=", "output=", "selector=", "ignore-daemonsets", "delete-emptydir-data", "from-file=",
	})
	if len(rest) == 0 || !slices.Contains([]string{"apply", "rollout", "create", "label", "exec", "logs", "wait", "get", "describe", "drain", "uncordon", "delete"}, rest[0]) {
		t.Errorf("%s: what is it to do?", where)
		return
	}
	if len(inside) > 0 {
		checkArgs(t, where, inside)
	}
	objects := render(t, `snapshots: {enabled: true}`)
	for _, word := range rest[1:] {
		kind, name, ok := strings.Cut(word, "/")
		if ok && strings.HasPrefix(name, "crust-") && !slices.ContainsFunc(objects, func(o object) bool { return strings.EqualFold(o.kind(), kind) && o.meta().GetName() == name }) {
			t.Errorf("%s: the chart makes no %s %s", where, kind, name)
		}
	}
	for _, container := range values["container"] {
		found := false
		for _, pod := range pods(objects) {
			for _, c := range pod.Spec.Containers {
				found = found || c.Name == container
			}
		}
		if !found {
			t.Errorf("%s: there is no container %s", where, container)
		}
	}
	for _, file := range values["filename"] {
		if strings.Contains(file, "/") {
			read(t, filepath.Join("../..", file))
		}
	}
}

// TestCertificatesByHand runs what the document says, and looks at what it has made.
func TestCertificatesByHand(t *testing.T) {
	priv.Program(t, "openssl")
	dir := t.TempDir()
	for _, b := range blocks(t) {
		if b.Info != "sh run" {
			continue
		}
		for line := range strings.Lines(b.Text) {
			argv := words(line)
			cmd := exec.Command(argv[0], argv[1:]...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", line, err, out)
			}
		}
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(read(t, filepath.Join(dir, "ca.crt"))) {
		t.Fatal("no authority was made")
	}
	for _, end := range []string{"node", "router"} {
		text, _ := pem.Decode(read(t, filepath.Join(dir, end+".crt")))
		cert, err := x509.ParseCertificate(text.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := cert.Verify(x509.VerifyOptions{DNSName: end + ".csi.crust.dev", Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
			t.Errorf("%s: %v", end, err)
		}
	}
}

// TestHostPathsAreDocumented, each of them, and no other.
func TestHostPathsAreDocumented(t *testing.T) {
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(/[^`]*)` \\|").FindAllStringSubmatch(document(t, "install.md"), -1) {
		documented[m[1]] = true
	}
	used := map[string]bool{}
	for _, pod := range pods(render(t, `{snapshots: {enabled: true}, crustd: {handlers: [{kind: remote}, {kind: kata}]}}`)) {
		for _, v := range pod.Spec.Volumes {
			if v.HostPath == nil {
				continue
			}
			used[v.HostPath.Path] = true
			if !documented[v.HostPath.Path] {
				t.Errorf("%s is not in docs/install.md", v.HostPath.Path)
			}
		}
	}
	for path := range documented {
		if !used[path] {
			t.Errorf("docs/install.md has %s, which no pod sees", path)
		}
	}
}

// TestLinks lead somewhere.
func TestLinks(t *testing.T) {
	for _, name := range docs.Documents {
		for _, m := range regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`).FindAllStringSubmatch(document(t, name), -1) {
			path := filepath.Join("../../docs", m[1])
			if m[1] == "" {
				path = filepath.Join("../../docs", name)
			}
			info, err := os.Stat(path)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			if m[2] == "" || info.IsDir() {
				continue
			}
			found := false
			for _, h := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(read(t, path)), -1) {
				anchor := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(h[1]), "")
				found = found || strings.ReplaceAll(anchor, " ", "-") == m[2]
			}
			if !found {
				t.Errorf("%s: %s has no heading #%s", name, path, m[2])
			}
		}
	}
}
