package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler/kata/config"
)

const (
	goQEMU = `
[hypervisor.qemu]
path = "/opt/kata/bin/qemu-system-x86_64"
disable_block_device_use = true
enable_annotations = ["enable_iommu", "virtio_fs_extra_args"]
[agent.kata]
[runtime]
internetworking_model="tcfilter"
`
	rustQEMU = `
[hypervisor.qemu]
disable_block_device_use = true
[hypervisor.dragonball]
rootless = true
[runtime]
name = "virt_container"
hypervisor_name = "qemu"
agent_name = "kata"
`
	defaults = "/opt/kata/share/defaults/kata-containers"
)

// tree writes files below a root; a content that begins with -> is a symbolic link.
func tree(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if to, ok := strings.CutPrefix(content, "->"); ok {
			err = os.Symlink(to, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func read(t *testing.T, files map[string]string, more ...string) []config.File {
	t.Helper()
	list, err := config.Read(tree(t, files), more...)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestRead(t *testing.T) {
	got := read(t, map[string]string{
		defaults + "/configuration-qemu.toml":                                     goQEMU,
		defaults + "/configuration.toml":                                          "->configuration-qemu.toml",
		"/etc/kata-containers/configuration.toml":                                 "->" + defaults + "/configuration-qemu.toml",
		defaults + "/config.d/10-debug.toml":                                      "[hypervisor.qemu]\nenable_debug = true\n",
		defaults + "/config.d/20-volumes":                                         "[hypervisor.qemu]\ndisable_block_device_use = false\n",
		defaults + "/runtimes/qemu-runtime-rs/configuration-qemu-runtime-rs.toml": rustQEMU,
		"/srv/kata/own.toml":                                                      goQEMU,
		"/etc/kata-containers/genpolicy-settings.json":                            "{}",
	}, "/srv/kata/own.toml")
	want := []config.File{
		{
			Path: defaults + "/configuration-qemu.toml", Runtime: config.Go,
			DropIns:     []string{defaults + "/config.d/10-debug.toml", defaults + "/config.d/20-volumes"},
			Hypervisors: map[string]config.Hypervisor{"qemu": {EnableAnnotations: []string{"enable_iommu", "virtio_fs_extra_args"}}},
		},
		{
			Path: defaults + "/runtimes/qemu-runtime-rs/configuration-qemu-runtime-rs.toml", Runtime: config.Rust,
			Hypervisors: map[string]config.Hypervisor{"qemu": {DisableBlockDeviceUse: true}},
		},
		{
			Path: "/srv/kata/own.toml", Runtime: config.Go,
			Hypervisors: map[string]config.Hypervisor{"qemu": {DisableBlockDeviceUse: true, EnableAnnotations: []string{"enable_iommu", "virtio_fs_extra_args"}}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestThereMayBeNone(t *testing.T) {
	if got := read(t, nil); len(got) != 0 {
		t.Errorf("in an empty tree there is %+v", got)
	}
}

func TestFindings(t *testing.T) {
	const path = "/etc/kata-containers/configuration.toml"
	const dropIn = "/etc/kata-containers/config.d/50"
	for name, tc := range map[string]struct {
		files    map[string]string
		severity config.Severity
		text     string // empty: no finding
	}{
		"the Go runtime without block devices":        {map[string]string{path: goQEMU}, config.Broken, "disable_block_device_use=true"},
		"a drop-in turns them on":                     {map[string]string{path: goQEMU, dropIn: "[hypervisor.qemu]\ndisable_block_device_use=false"}, "", ""},
		"a drop-in turns them off":                    {map[string]string{path: "[hypervisor.clh]", dropIn: "hypervisor.clh.disable_block_device_use=true"}, config.Broken, "disable_block_device_use=true"},
		"Firecracker always has them":                 {map[string]string{path: "[hypervisor.firecracker]\ndisable_block_device_use=true"}, "", ""},
		"runtime-rs does not look, nor at the others": {map[string]string{path: rustQEMU}, "", ""},
		"runtime-rs without root":                     {map[string]string{path: strings.Replace(rustQEMU, `"qemu"`, `"dragonball"`, 1)}, config.Broken, "rootless=true"},
		"a confidential guest":                        {map[string]string{path: "[hypervisor.qemu]\nconfidential_guest=true"}, config.Limited, "statistics"},
		"no TOML":                                     {map[string]string{path: "= ["}, config.Broken, "cannot be read"},
		"a drop-in that is no TOML":                   {map[string]string{path: goQEMU, dropIn: "x"}, config.Broken, "cannot be read"},
		"a directory among the drop-ins":              {map[string]string{path: goQEMU, dropIn + "/x": ""}, config.Broken, "cannot be read"},
		"a link to nowhere":                           {map[string]string{path: "->/gone"}, config.Broken, "cannot be read"},
		"a string for a bool":                         {map[string]string{path: "[hypervisor.qemu]\ndisable_block_device_use=\"true\""}, config.Broken, "no bool"},
	} {
		t.Run(name, func(t *testing.T) {
			var findings []config.Finding
			for _, f := range read(t, tc.files) {
				findings = append(findings, f.Findings()...)
			}
			if tc.text == "" {
				if len(findings) > 0 {
					t.Errorf("findings: %v", findings)
				}
				return
			}
			if len(findings) != 1 || findings[0].Severity != tc.severity || !strings.Contains(findings[0].String(), tc.text) || findings[0].Cure == "" {
				t.Errorf("findings: %+v, want one that is %s and says %q", findings, tc.severity, tc.text)
			}
		})
	}
}

// FuzzRead: whatever is in a file, reading it ends, and it either has an error or belongs to one of the runtimes.
func FuzzRead(f *testing.F) {
	f.Add(goQEMU, rustQEMU)
	f.Add("hypervisor=1", "runtime=[1]")
	f.Add("[hypervisor]\nqemu=1", "[[hypervisor.qemu]]\nrootless=true")
	f.Fuzz(func(t *testing.T, file, dropIn string) {
		if strings.HasPrefix(file, "->") || strings.HasPrefix(dropIn, "->") {
			return
		}
		for _, got := range read(t, map[string]string{"/etc/kata-containers/a.toml": file, "/etc/kata-containers/config.d/b": dropIn}) {
			if got.Err == nil && got.Runtime != config.Go && got.Runtime != config.Rust {
				t.Errorf("%q with %q reads as %+v", file, dropIn, got)
			}
		}
	})
}
