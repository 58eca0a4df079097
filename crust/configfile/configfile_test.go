package configfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/crust/configfile"
)

func parse(text string) (*configfile.File, error) {
	return configfile.Parse("crustd.yaml", []byte(text))
}

func TestParse(t *testing.T) {
	f, err := parse(`apiVersion: crust.dev/v1
kind: CrustdConfiguration
drivers:
- {endpoint: unix:///run/a.sock, upstream: unix:///run/b.sock, register: true}
- endpoint: /run/c.sock
  upstream: unix:/run/d.sock
runtimeEndpoint: unix:///run/rt.sock
kepEndpoint: unix:///run/kep.sock
adminEndpoint: ""
http: {address: "127.0.0.1:9808", profiling: true}
registrationDir: /var/lib/kubelet/plugins_registry
stateDir: /var/lib/crust
handlers:
- kind: remote
- kind: cli
  name: kep
  root: /run/kep
  timeout: 1m30s
  capabilities: [format, grow]
shimHandler: remote
defaultHandler: kep
policy: {default: auto}
runtimeClasses: {kata-qemu: remote, 7: kep}
kubernetes: {}
log: {level: warn, format: json}
`)
	if err != nil {
		t.Fatal(err)
	}
	type settings struct {
		Root         string        `yaml:"root"`
		Timeout      time.Duration `yaml:"timeout"`
		Capabilities []string      `yaml:"capabilities"`
	}
	var s settings
	if err := f.Handlers[1].Settings(&s); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(settings{"/run/kep", 90 * time.Second, []string{"format", "grow"}}, s); diff != "" {
		t.Errorf("settings: -want +got\n%s", diff)
	}
	if err := f.Handlers[0].Settings(&struct{}{}); err != nil {
		t.Errorf("no settings: %v", err)
	}
	none := ""
	want := &configfile.File{
		APIVersion: "crust.dev/v1", Kind: "CrustdConfiguration",
		Drivers:         []configfile.Driver{{"unix:///run/a.sock", "unix:///run/b.sock", true}, {"/run/c.sock", "unix:/run/d.sock", false}},
		RuntimeEndpoint: "unix:///run/rt.sock", KEPEndpoint: "unix:///run/kep.sock", AdminEndpoint: &none,
		HTTP:            configfile.HTTP{Address: "127.0.0.1:9808", Profiling: true},
		RegistrationDir: "/var/lib/kubelet/plugins_registry", StateDir: "/var/lib/crust",
		Handlers:    []configfile.Handler{{Kind: "remote"}, {Kind: "cli", Name: "kep"}},
		ShimHandler: "remote", DefaultHandler: "kep",
		Policy:         configfile.Policy{Default: "auto"},
		RuntimeClasses: map[string]string{"kata-qemu": "remote", "7": "kep"},
		Kubernetes:     &configfile.Kubernetes{},
		Log:            configfile.Log{Level: "warn", Format: "json"},
	}
	if diff := cmp.Diff(want, f, ignorePlaces); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// ignorePlaces leaves out where in a file a value is.
var ignorePlaces = cmp.FilterPath(func(p cmp.Path) bool {
	name := p.Last().String()
	return name == ".source" || name == ".path" || name == ".settings"
}, cmp.Ignore())

func TestErrors(t *testing.T) {
	for name, row := range map[string]struct{ text, want string }{
		"a key that is misspelt":         {"stateDir: /a\ndrivrs: []\n", `crustd.yaml:2: unknown key "drivrs"; did you mean "drivers"?`},
		"a key in another case":          {"statedir: /a\n", `crustd.yaml:1: unknown key "statedir"; did you mean "stateDir"?`},
		"a key like no other":            {"http:\n  port: 80\n", `crustd.yaml:2: unknown key "http.port"; there is address, profiling`},
		"a key of an item":               {"drivers:\n- endpoint: /a\n  upstream: /b\n  registered: true\n", `crustd.yaml:4: unknown key "drivers[0].registered"; did you mean "register"?`},
		"a key twice":                    {"stateDir: /a\n\nstateDir: /b\n", `crustd.yaml:3: key "stateDir" is here a second time; the first is in line 1`},
		"a class twice":                  {"runtimeClasses:\n  a: x\n  a: y\n", `crustd.yaml:3: key "a" is here a second time; the first is in line 2`},
		"a key without a value":          {"kubernetes:\n", `crustd.yaml:1: kubernetes has no value; take the key out, or give it one ({} or [] if it is to be empty)`},
		"an item without a value":        {"drivers:\n-\n", `crustd.yaml:2: drivers[0] has no value;`},
		"a list that is none":            {"drivers: {endpoint: /a}\n", `crustd.yaml:1: drivers: want a list, not keys with values; put "- " before each item`},
		"a text that is a list":          {"stateDir: [/a]\n", `crustd.yaml:1: stateDir: want a text, not a list`},
		"a section that is a text":       {"log: debug\n", `crustd.yaml:1: log: want keys with values, not "debug"`},
		"a boolean in words":             {"http:\n  profiling: yes\n", `crustd.yaml:2: http.profiling: want true or false, not "yes"`},
		"another version":                {"apiVersion: crust.dev/v2\n", `crustd.yaml:1: apiVersion: "crust.dev/v2": want crust.dev/v1`},
		"another kind":                   {"kind: Pod\n", `crustd.yaml:1: kind: "Pod": want CrustdConfiguration`},
		"a driver without a socket":      {"drivers:\n- endpoint: /a\n", `crustd.yaml:2: drivers[0] has no upstream`},
		"a socket that is none":          {"\nruntimeEndpoint: tcp://x\n", `crustd.yaml:2: runtimeEndpoint: endpoint "tcp://x": want unix:///absolute/path`},
		"a socket whose path is long":    {"kepEndpoint: /" + strings.Repeat("x", 107) + "\n", `108 bytes, a unix socket takes 107 at most`},
		"a relative directory":           {"stateDir: state\n", `crustd.yaml:1: stateDir: "state": want an absolute path`},
		"an empty directory":             {"registrationDir: ''\n", `crustd.yaml:1: registrationDir: "": want an absolute path`},
		"an address without a port":      {"http: {address: localhost}\n", `crustd.yaml:1: http.address: address localhost: missing port in address; want HOST:PORT`},
		"an unknown policy":              {"policy:\n  default: always\n", `crustd.yaml:2: policy.default: "always": want never or auto`},
		"an unknown level":               {"log:\n  level: trace\n", `crustd.yaml:2: log.level: "trace": want debug, info, warn or error`},
		"an unknown format":              {"log: {format: xml}\n", `crustd.yaml:1: log.format: "xml": want text or json`},
		"a handler without a kind":       {"handlers:\n- name: x\n", `crustd.yaml:2: handlers[0] has no kind`},
		"a handler that is a text":       {"handlers: [remote]\n", `crustd.yaml:1: handlers[0]: want keys with values, not "remote"`},
		"an anchor":                      {"stateDir: &a /x\n", `crustd.yaml:1: stateDir: anchors and aliases are not supported`},
		"an alias":                       {"stateDir: &a /x\nregistrationDir: *a\n", `crustd.yaml:2: registrationDir: anchors and aliases are not supported`},
		"a key that is a list":           {"[a]: b\n", `crustd.yaml:1: the file: a key must be a plain text`},
		"what is not YAML":               {"stateDir: /a\n  http: x\n", `crustd.yaml:2: this is not YAML: mapping values are not allowed in this context`},
		"a tab":                          {"log:\n\tlevel: info\n", `crustd.yaml:2: this is not YAML: found character that cannot start any token`},
		"two documents":                  {"stateDir: /a\n---\nstateDir: /b\n", `crustd.yaml: there is more than one YAML document in the file`},
		"nothing":                        {"", `crustd.yaml: the file is empty; docs/configuration.md has an example`},
		"white space":                    {" \n\n", `crustd.yaml: the file is empty`},
		"comments only":                  {"# stateDir: /a\n", `crustd.yaml: the file is empty`},
		"null":                           {"null\n", `crustd.yaml:1: the file has no value`},
		"a list":                         {"- a\n", `crustd.yaml:1: the file: want keys with values, not a list`},
		"bytes that are no text":         {"a: \xff\n", `crustd.yaml: this is not YAML: invalid leading UTF-8 octet`},
		"everything at once, line after": {"log: {level: x}\na: 1\nb: 2\n", "crustd.yaml:2: unknown key \"a\""},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parse(row.text)
			if !errors.Is(err, errdefs.ErrInvalidArgument) || f != nil {
				t.Fatalf("got %v, %v", f, err)
			}
			if !strings.Contains(err.Error(), row.want) {
				t.Errorf("got\n%v\nwant\n%s", err, row.want)
			}
		})
	}
}

func TestAllErrorsAreToldInTheOrderOfTheirLines(t *testing.T) {
	_, err := parse("stateDir: x\nlog: 1\nnonsense: 2\nhttp: []\n")
	want := `crustd.yaml:2: log: want keys with values, not "1"
crustd.yaml:3: unknown key "nonsense"; there is `
	if err == nil || !strings.HasPrefix(err.Error(), want) || !strings.HasSuffix(err.Error(), "\ncrustd.yaml:4: http: want keys with values, not a list") {
		t.Errorf("got\n%v", err)
	}
}

func TestHandlerSettings(t *testing.T) {
	f, err := parse("handlers:\n- kind: cli\n  timeout: -1s\n  root: /x\n  rot: /y\n")
	if err != nil {
		t.Fatal(err)
	}
	var s struct {
		Root    string        `yaml:"root"`
		Timeout time.Duration `yaml:"timeout"`
	}
	err = f.Handlers[0].Settings(&s)
	want := `crustd.yaml:3: handlers[0].timeout: "-1s" is not a positive duration such as 10s or 1m30s
crustd.yaml:5: unknown key "handlers[0].rot"; did you mean "root"?`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v", err)
	}
	if err := f.Handlers[0].Errorf("root", "is bad"); err.Error() != "crustd.yaml:4: is bad" {
		t.Errorf("got %v", err)
	}
	if err := f.Handlers[0].Errorf("", "is bad"); err.Error() != "crustd.yaml:2: is bad" {
		t.Errorf("got %v", err)
	}
}

func TestChanges(t *testing.T) {
	const before = `stateDir: /a
handlers: [{kind: cli, root: /x}]
runtimeClasses: {a: b}
log: {level: info}
`
	for name, row := range map[string]struct {
		after string
		want  []string
	}{
		"nothing":           {before, nil},
		"spelling":          {"# a comment\nlog:\n  level: \"info\"\nruntimeClasses:\n  a: b\nhandlers:\n- kind: cli # another\n  root: /x\nstateDir: /a\n", nil},
		"values":            {strings.NewReplacer("info", "warn", "a: b", "a: c").Replace(before), []string{"log", "runtimeClasses"}},
		"a handler's value": {strings.Replace(before, "/x", "/y", 1), []string{"handlers"}},
		"a key more":        {before + "kubernetes: {}\n", []string{"kubernetes"}},
		"a key less":        {strings.Replace(before, "stateDir: /a\n", "", 1), []string{"stateDir"}},
	} {
		a, err := parse(before)
		if err != nil {
			t.Fatal(err)
		}
		b, err := parse(row.after)
		if err != nil {
			t.Fatal(err)
		}
		if a.SameText(b) != (name == "nothing") {
			t.Errorf("%s: the text is the same: %t", name, a.SameText(b))
		}
		if diff := cmp.Diff(row.want, configfile.Changes(a, b)); diff != "" {
			t.Errorf("%s: -want +got\n%s", name, diff)
		}
	}
}

func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "crustd.yaml")
	if _, err := configfile.Read(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(path, []byte("stateDir: /a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err := configfile.Read(path); err != nil || f.StateDir != "/a" || !f.Has("stateDir") || f.Has("log") {
		t.Errorf("got %v, %v", f, err)
	}
	if err := os.WriteFile(path, make([]byte, 1<<20+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := configfile.Read(path); !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Errorf("a huge file: %v", err)
	}
}

func TestReadRefusesWhatIsNoFile(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, t.TempDir(), "/dev/null"} {
		if _, err := configfile.Read(path); !errors.Is(err, errdefs.ErrInvalidArgument) || !strings.Contains(err.Error(), "is not a regular file") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// lines counts lines as YAML does. An error at the end of the text may be one line behind the last.
func lines(text string) int {
	n := 1
	for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} {
		n += strings.Count(text, end)
	}
	return n
}

// FuzzParse: whatever the text, there is either a file or errors that name a line within it; the same text gives the
// same file; and a key that is not ours is never accepted.
func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"stateDir: /a\n", "drivers: [{endpoint: /a, upstream: /b}]", "handlers:\n- kind: cli\n  x: [1, {y: z}]\n", "a: &a [*a]", "? [x]\n: y", "log: {level: info}\nlog: 1",
		"kubernetes: {}", "runtimeClasses: {~: x, true: y}", "%TAG ! x\n---\n!a {}", "'': ''",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		first, err := parse(text)
		second, _ := parse(text)
		if (first == nil) != (second == nil) || first != nil && len(configfile.Changes(first, second)) > 0 {
			t.Errorf("parsed twice, it is not the same: %v, %v", first, second)
		}
		if (first == nil) == (err == nil) {
			t.Fatalf("got %v, %v", first, err)
		}
		var e *configfile.Error
		if err != nil && (!errors.As(err, &e) || e.Line < 0 || e.Line > lines(text)+1) {
			t.Errorf("no error with a line of the text: %v", err)
		}
		if _, err := parse("noSuchKey: 1\n" + text); err == nil {
			t.Error("an unknown key was accepted")
		}
	})
}
