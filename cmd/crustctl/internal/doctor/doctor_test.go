package doctor_test

import (
	"context"
	"encoding/base64"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"crust.dev/crust/cmd/crustctl/internal/doctor"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

const (
	target  = "/var/lib/kubelet/pods/0dd1d3a2-6c0f-4a57-9d8e-3a0d5f4d9d11/volumes/kubernetes.io~csi/pvc-1/mount"
	bootID  = "6f0ee3c8-61c1-4a4c-9a39-53ee7d1b3d7c"
	records = "/run/kata-containers/shared/direct-volumes/"
)

// sound is a node on which everything is in order.
func sound() map[string]string {
	return map[string]string{
		"/proc/self/status":                  "Name:\tcrustctl\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n",
		"/proc/sys/kernel/osrelease":         "6.12.0-amd64\n",
		"/proc/sys/kernel/random/boot_id":    bootID + "\n",
		"/proc/filesystems":                  "nodev\ttmpfs\nnodev\tbpf\n\text4\n",
		"/proc/1/mountinfo":                  "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 8:1 /k /var/lib/kubelet rw shared:1 - ext4 /dev/sda1 rw\n",
		"/dev/kvm":                           "->/dev/null",
		"/var/lib/kubelet/plugins_registry/": "",
		"/var/lib/crust/":                    "",
		target + "/":                         "",
		"/run/crust/admin.sock":              "socket",
		"/run/crust/runtime.sock":            "socket",
		"/run/crust/csi.sock":                "socket",
		"/run/driver.sock":                   "socket",
	}
}

// tree makes files below a root. A name that ends in a slash is a directory, a content that begins with -> a symbolic
// link, and the content "socket" a socket.
func tree(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root, err := os.MkdirTemp("", "d-") // t.TempDir would be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	for name, content := range files {
		path := root + name
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		to, link := strings.CutPrefix(content, "->")
		switch {
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(path, 0o700)
		case link:
			err = os.Symlink(to, path)
		case content == "socket":
			var l net.Listener
			if l, err = net.Listen("unix", path); err == nil {
				l.(*net.UnixListener).SetUnlinkOnClose(false)
				err = errors.Join(os.Chmod(path, 0o600), l.Close())
			}
		default:
			err = os.WriteFile(path, []byte(content), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// The node's null device stands for KVM's: a test cannot make devices.
	if _, ok := files["/dev/kvm"]; ok {
		if err := os.WriteFile(root+"/dev/null", nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func running() *adminv1.GetStatusResponse {
	return &adminv1.GetStatusResponse{
		Version:  "v1",
		Checks:   []*adminv1.Check{{Name: "driver /run/driver.sock", Ok: true}, {Name: "configuration", Ok: true}},
		StateDir: "/var/lib/crust", RuntimeEndpoint: "/run/crust/runtime.sock",
		Drivers:  []*adminv1.Driver{{Name: "a.example", Endpoint: "/run/crust/csi.sock", Upstream: "/run/driver.sock"}},
		Handlers: []*adminv1.Handler{{Name: "remote", RuntimeClasses: []string{"kata-qemu"}}},
	}
}

func kataHandler(s *adminv1.GetStatusResponse) {
	s.Handlers = append(s.Handlers, &adminv1.Handler{Name: "kata", Roots: []string{"/run/kata-containers/shared/direct-volumes"}})
}

// row is a node that differs from a sound one, and what is to be found on it.
type row struct {
	files     map[string]string // added; an empty content of a name in sound takes it away
	status    func(*adminv1.GetStatusResponse)
	deferrals []*adminv1.Deferral
	node      func(*doctor.Node)
	down      bool

	check    string
	severity doctor.Severity
	what     string
	cure     string
}

func (r row) examine(t *testing.T) doctor.Report {
	t.Helper()
	files := sound()
	for name, content := range r.files {
		if _, ok := files[name]; ok && content == "" {
			delete(files, name)
		} else {
			files[name] = content
		}
	}
	n := doctor.Node{
		Root: tree(t, files), Version: "v1", AdminSocket: "/run/crust/admin.sock", ConfigFile: "/etc/crust/crustd.yaml", Deferrals: r.deferrals,
		Filesystem: func(string) (doctor.Filesystem, error) {
			return doctor.Filesystem{FreeBytes: 1 << 40, FreeInodes: -1}, nil
		},
	}
	if r.down {
		n.DaemonErr = errors.New("connection refused")
	} else {
		n.Status = running()
		if r.status != nil {
			r.status(n.Status)
		}
	}
	if r.node != nil {
		r.node(&n)
	}
	return doctor.Examine(context.Background(), n)
}

func record(path, content string) map[string]string {
	return map[string]string{records + base64.URLEncoding.EncodeToString([]byte(path)) + "/mountInfo.json": content}
}

const goRuntime = "[hypervisor.qemu]\ndisable_block_device_use = true\n[agent.kata]\n"

func TestFindings(t *testing.T) {
	digest := strings.Repeat("ab", 32)
	for name, r := range map[string]row{
		"not root": {files: map[string]string{"/proc/self/status": "Uid:\t7\t1000\t7\t7\nCapEff:\t0000000000000000\n"},
			check: "privileges", severity: doctor.Error, what: "user 1000", cure: "as root"},
		"a capability less": {files: map[string]string{"/proc/self/status": "Uid:\t0\t0\t0\t0\nCapEff:\t000001ffffdfffff\n"},
			check: "privileges", severity: doctor.Warning, what: "without CAP_SYS_ADMIN", cure: "give it CAP_SYS_ADMIN"},
		"an old kernel":            {files: map[string]string{"/proc/sys/kernel/osrelease": "5.1.21\n"}, check: "kernel", severity: doctor.Error, what: "5.1.21", cure: "Linux 5.2"},
		"a kernel without bpf":     {files: map[string]string{"/proc/filesystems": "nodev\ttmpfs\n"}, check: "kernel", severity: doctor.Error, what: "no bpf filesystem", cure: "CONFIG_BPF_SYSCALL"},
		"no KVM":                   {files: map[string]string{"/dev/kvm": ""}, check: "kvm", severity: doctor.Warning, what: "no /dev/kvm", cure: "nested virtualisation"},
		"a file for KVM":           {check: "kvm", severity: doctor.Warning, what: "is not a device", cure: "load kvm_intel"},
		"a bad configuration":      {files: map[string]string{"/etc/crust/crustd.yaml": "stateDir: /a\nx: 1\n"}, check: "configuration", severity: doctor.Error, what: `/etc/crust/crustd.yaml:2: unknown key "x"`, cure: "--check-config"},
		"a good configuration":     {files: map[string]string{"/etc/crust/crustd.yaml": "stateDir: /a\n"}, check: "configuration", severity: doctor.OK, what: "is valid"},
		"its configuration's gone": {status: func(s *adminv1.GetStatusResponse) { s.ConfigFile = "/etc/other.yaml" }, check: "configuration", severity: doctor.Error, what: "/etc/other.yaml: no such file", cure: "mend"},
		"crustd is down":           {down: true, check: "crustd", severity: doctor.Error, what: "does not answer on /run/crust/admin.sock: connection refused", cure: "start crustd"},
		"another version":          {status: func(s *adminv1.GetStatusResponse) { s.Version = "v2" }, check: "crustd", severity: doctor.Warning, what: "crustd is v2, crustctl is v1", cure: "one release"},
		"the driver is silent": {status: func(s *adminv1.GetStatusResponse) {
			s.Checks[0].Ok, s.Checks[0].Message = false, "no such file"
		}, check: "crustd", severity: doctor.Error, what: "driver /run/driver.sock: no such file", cure: "start the CSI driver"},
		"a changed configuration": {status: func(s *adminv1.GetStatusResponse) {
			s.Checks[1].Ok, s.Checks[1].Message = false, "drivers: changed"
		}, check: "crustd", severity: doctor.Error, what: "configuration: drivers: changed", cure: "restart crustd"},
		"a socket is gone":        {files: map[string]string{"/run/crust/runtime.sock": ""}, check: "sockets", severity: doctor.Error, what: "for shims, /run/crust/runtime.sock, is not there", cure: "restart crustd"},
		"a driver's socket":       {files: map[string]string{"/run/driver.sock": ""}, check: "sockets", severity: doctor.Error, what: "of the driver, /run/driver.sock, is not there", cure: "start the CSI driver"},
		"a file for a socket":     {files: map[string]string{"/run/crust/csi.sock": "x"}, check: "sockets", severity: doctor.Error, what: "for the kubelet, /run/crust/csi.sock, is no socket", cure: "remove it"},
		"a link for a socket":     {files: map[string]string{"/run/crust/csi.sock": "->/run/driver.sock"}, check: "sockets", severity: doctor.Error, what: "is no socket", cure: "remove it"},
		"sockets while it's down": {down: true, files: map[string]string{"/run/crust/runtime.sock": "", "/run/crust/admin.sock": ""}, check: "sockets", severity: doctor.OK, what: "0 sockets"},
		"a driver's socket, by the file": {down: true, files: map[string]string{"/etc/crust/crustd.yaml": "drivers: [{endpoint: /run/a.sock, upstream: /run/b.sock}]\n"},
			check: "sockets", severity: doctor.Error, what: "of the driver, /run/b.sock, is not there", cure: "upstream"},
		"an open socket": {node: func(n *doctor.Node) {
			if err := os.Chmod(n.Root+"/run/crust/runtime.sock", 0o666); err != nil {
				panic(err)
			}
		}, check: "sockets", severity: doctor.Warning, what: "/run/crust/runtime.sock, has mode 0666", cure: "restart crustd"},
		"no state directory":                 {files: map[string]string{"/var/lib/crust/": ""}, check: "state", severity: doctor.Error, what: "no such file", cure: "restart crustd"},
		"no state directory, crustd is down": {down: true, files: map[string]string{"/var/lib/crust/": ""}, check: "state", severity: doctor.OK, what: "crustd makes it"},
		"another one, by the file":           {down: true, files: map[string]string{"/etc/crust/crustd.yaml": "stateDir: /srv/state\n", "/srv/state": "x"}, check: "state", severity: doctor.Error, what: "/srv/state is no directory", cure: "another stateDir"},
		"a full disk":                        {node: free(1000, 5, false), check: "state", severity: doctor.Error, what: "no space left (1000)", cure: "free space"},
		"no inodes":                          {node: free(1<<40, 0, false), check: "state", severity: doctor.Error, what: "no space left", cure: "free space"},
		"little space":                       {node: free(20<<20, 5, false), check: "state", severity: doctor.Warning, what: "only 20Mi left", cure: "free space"},
		"state in memory":                    {node: free(1<<40, 5, true), check: "state", severity: doctor.Error, what: "is in memory", cure: "on a disk"},
		"no kubelet":                         {node: func(n *doctor.Node) { n.KubeletDir = "/srv/kubelet" }, check: "kubelet", severity: doctor.Error, what: "/srv/kubelet is not there", cure: "--kubelet-dir"},
		"no plugins_registry":                {files: map[string]string{"/var/lib/kubelet/plugins_registry/": ""}, check: "kubelet", severity: doctor.Error, what: "plugins_registry is not there", cure: "running kubelet"},
		"a private mount": {files: map[string]string{"/proc/1/mountinfo": "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n22 21 8:1 /v /var/lib rw - ext4 /dev/sda1 rw\n"},
			check: "kubelet", severity: doctor.Warning, what: "/var/lib/kubelet is on the mount of /var/lib, which is not shared", cure: "make-rshared"},
		"no list of mounts": {files: map[string]string{"/proc/1/mountinfo": "x\n"}, check: "kubelet", severity: doctor.Warning, what: "is not known", cure: "/proc/1/mountinfo"},
		"a link to the kubelet": {files: map[string]string{"/k": "->/var/lib/kubelet"}, node: func(n *doctor.Node) { n.KubeletDir = "/k" },
			check: "kubelet", severity: doctor.Warning, what: "/k is a symbolic link to /var/lib/kubelet", cure: "--root-dir=/var/lib/kubelet"},
		"short paths": {check: "path-length", severity: doctor.OK, what: "may have 98 bytes"},
		"a long path": {node: long, check: "path-length", severity: doctor.Warning, what: "may have 33 bytes", cure: "shorter --root-dir"},
		"a long path, and Kata": {node: long, status: kataHandler,
			check: "path-length", severity: doctor.Error, what: "may have 33 bytes", cure: "shorter --root-dir"},
		"a long path, and Kata by the file": {node: long, down: true, files: map[string]string{"/etc/crust/crustd.yaml": "handlers: [{kind: kata}]\n"},
			check: "path-length", severity: doctor.Error, what: "may have 33 bytes", cure: "shorter --root-dir"},
		"Kata's Go runtime": {files: map[string]string{"/etc/kata-containers/configuration.toml": goRuntime},
			check: "runtimes", severity: doctor.Warning, what: "[hypervisor.qemu]: disable_block_device_use=true", cure: "disable_block_device_use=false"},
		"Kata's Go runtime, with a handler": {files: map[string]string{"/etc/kata-containers/configuration.toml": goRuntime}, status: kataHandler,
			check: "runtimes", severity: doctor.Error, what: "disable_block_device_use=true", cure: "config.d"},
		"Kata, cured by a drop-in": {files: map[string]string{
			"/etc/kata-containers/configuration.toml":       goRuntime,
			"/etc/kata-containers/config.d/50-volumes.toml": "[hypervisor.qemu]\ndisable_block_device_use = false\n"}, status: kataHandler,
			check: "runtimes", severity: doctor.OK, what: "Go runtime: /etc/kata-containers/configuration.toml (qemu) with /etc/kata-containers/config.d/50-volumes.toml"},
		"no Kata, but a handler":     {status: kataHandler, check: "runtimes", severity: doctor.Warning, what: "no configuration of Kata was found", cure: "install Kata"},
		"a handler":                  {check: "runtimes", severity: doctor.OK, what: "crustd's handler remote, for handlers of RuntimeClasses kata-qemu"},
		"a stranger's record in use": {files: record(target, `{"device":"/dev/x"}`), check: "records", severity: doctor.OK, what: "1 records for runtimes, none of them stale"},
		"a stranger's record, stale": {files: record("/var/lib/kubelet/pods/x", `{}`),
			check: "records", severity: doctor.Warning, what: "for /var/lib/kubelet/pods/x is stale: the path is not there", cure: "remove " + records},
		"a record of ours, stale": {files: record(target, `{"metadata":{"crust.dev/handler":"kata"}}`),
			check: "records", severity: doctor.Warning, what: "crustd has no such deferral", cure: "crustctl gc"},
		"a record of ours, in use": {files: record(target, `{"metadata":{"crust.dev/handler":"kata"}}`), deferrals: []*adminv1.Deferral{{TargetPath: target}},
			check: "records", severity: doctor.OK, what: "1 records"},
		"a record of ours, and nobody to ask": {down: true, files: record(target, `{"metadata":{"crust.dev/handler":"kata"}}`), check: "records", severity: doctor.OK, what: "1 records"},
		"half a record":                       {files: map[string]string{records + base64.URLEncoding.EncodeToString([]byte(target)) + "/": ""}, check: "records", severity: doctor.Error, what: "has no mountInfo.json", cure: "remove"},
		"a foreign name":                      {files: map[string]string{records + "x!/mountInfo.json": "{}"}, check: "records", severity: doctor.Error, what: "its name is no path in base64", cure: "remove"},
		"no JSON":                             {files: record(target, "{"), check: "records", severity: doctor.Error, what: "cannot be read: unexpected end of JSON", cure: "remove"},
		"a record of KEP-2857, stale": {files: map[string]string{"/run/crust/" + digest + "/mountInfo.json": `{"metadata":{"crust.dev/target-path":"/gone"}}`},
			check: "records", severity: doctor.Warning, what: "for /gone is stale", cure: "crustctl gc"},
		"our own directories are no records": {files: map[string]string{"/run/crust/sandboxes/": ""}, check: "records", severity: doctor.OK, what: "0 records"},
		"a sandbox of an earlier boot": {deferrals: []*adminv1.Deferral{{VolumeId: "v", TargetPath: target, Sandbox: &adminv1.Sandbox{Id: "s", BootId: "other"}}},
			check: "sandboxes", severity: doctor.Error, what: "volume v is recorded as held by sandbox s of an earlier boot", cure: "crustctl gc"},
		"a sandbox of this boot": {deferrals: []*adminv1.Deferral{{VolumeId: "v", TargetPath: target, Sandbox: &adminv1.Sandbox{Id: "s", BootId: bootID}}},
			check: "sandboxes", severity: doctor.OK, what: "1 volumes are deferred"},
		"a sandbox without its volume": {deferrals: []*adminv1.Deferral{{VolumeId: "v", TargetPath: target, Phase: "breached", Sandbox: &adminv1.Sandbox{Id: "s", Breach: "Kata ignored it"}}},
			check: "sandboxes", severity: doctor.Error, what: "volume v is not in its sandbox s: Kata ignored it", cure: "delete the pod"},
		"an unfinished expansion": {deferrals: []*adminv1.Deferral{{VolumeId: "v", TargetPath: target, ExpandingBytes: 1}},
			check: "sandboxes", severity: doctor.Warning, what: "the expansion of volume v is not finished", cure: "crustctl expand v"},
	} {
		t.Run(name, func(t *testing.T) {
			report := r.examine(t)
			fits := func(f doctor.Finding) bool {
				return f.Check == r.check && f.Severity == r.severity && strings.Contains(f.What, r.what) && strings.Contains(f.Cure, r.cure)
			}
			if !slices.ContainsFunc(report.Findings, fits) {
				t.Errorf("no finding %s %s %q with %q in", r.check, r.severity, r.what, r.cure)
			}
			errors, warnings := 0, 0
			for _, f := range report.Findings {
				switch f.Severity {
				case doctor.Error:
					errors++
				case doctor.Warning:
					warnings++
				}
				if (f.Severity == doctor.OK) != (f.Cure == "") || (f.Severity == doctor.OK) != (f.Why == "") || f.Check == "" || f.What == "" {
					t.Errorf("a finding is not complete: %+v", f)
				}
			}
			if errors != report.Errors || warnings != report.Warnings {
				t.Errorf("counted %d errors, %d warnings; it says %d, %d", errors, warnings, report.Errors, report.Warnings)
			}
			if t.Failed() {
				for _, f := range report.Findings {
					t.Logf("%+v", f)
				}
			}
		})
	}
}

func free(bytes, inodes int64, inMemory bool) func(*doctor.Node) {
	return func(n *doctor.Node) {
		n.Filesystem = func(string) (doctor.Filesystem, error) {
			return doctor.Filesystem{FreeBytes: bytes, FreeInodes: inodes, InMemory: inMemory}, nil
		}
	}
}

func long(n *doctor.Node) { n.KubeletDir = "/var/lib/" + strings.Repeat("x", 72) }

// TestANamedPipeForARecord: doctor does not wait for whoever has made it.
func TestANamedPipeForARecord(t *testing.T) {
	dir := records + base64.URLEncoding.EncodeToString([]byte(target))
	r := row{files: map[string]string{dir + "/": ""}, node: func(n *doctor.Node) {
		if err := syscall.Mkfifo(n.Root+dir+"/mountInfo.json", 0o600); err != nil {
			t.Fatal(err)
		}
	}}
	if !slices.ContainsFunc(r.examine(t).Findings, func(f doctor.Finding) bool {
		return f.Check == "records" && f.Severity == doctor.Error && strings.Contains(f.What, "is not a regular file")
	}) {
		t.Error("there is no finding")
	}
}

// FuzzRecords: whatever others put where records are, there is a complete finding about it.
func FuzzRecords(f *testing.F) {
	f.Add("x", "{}")
	f.Add(base64.URLEncoding.EncodeToString([]byte(target)), `{"metadata":{"crust.dev/handler":"kata"}}`)
	f.Add(base64.URLEncoding.EncodeToString([]byte("../../..")), `{"metadata":null}`)
	f.Add(strings.Repeat("a", 64), `{"metadata":{"crust.dev/target-path":"\u0000"}}`)
	f.Fuzz(func(t *testing.T, name, content string) {
		if name == "" || name == "." || name == ".." || len(name) > 255 || strings.ContainsAny(name, "/\x00") {
			t.Skip()
		}
		report := row{files: map[string]string{records + name + "/mountInfo.json": content, "/run/crust/" + name + "/mountInfo.json": content}}.examine(t)
		found := 0
		for _, f := range report.Findings {
			if f.Check == "records" && f.What != "" && (f.Severity == doctor.OK) == (f.Cure == "") {
				found++
			}
		}
		if found == 0 {
			t.Errorf("%+v", report)
		}
	})
}

// TestSoundNode: where everything is in order, nothing else is said. KVM is left out: a test cannot make its device.
func TestSoundNode(t *testing.T) {
	for _, f := range (row{}).examine(t).Findings {
		if f.Severity != doctor.OK && f.Check != "kvm" {
			t.Errorf("%+v", f)
		}
	}
}

// TestLinksStayBelowTheRoot: doctor in a pod looks at the node, not at its own image.
func TestLinksStayBelowTheRoot(t *testing.T) {
	r := row{files: map[string]string{"/var/lib/crust/": "", "/var/lib/crust": "->/proc", "/proc/2": "x"}, check: "state"}
	for _, f := range r.examine(t).Findings {
		if f.Check == "state" && f.Severity != doctor.OK {
			t.Errorf("%+v", f)
		}
	}
}

func TestStatfs(t *testing.T) {
	fs, err := doctor.Statfs(t.TempDir())
	if err != nil || fs.FreeBytes <= 0 {
		t.Errorf("%+v, %v", fs, err)
	}
	if fs, err := doctor.Statfs("/dev/shm"); err == nil && !fs.InMemory {
		t.Errorf("/dev/shm: %+v", fs)
	}
	if _, err := doctor.Statfs("/nonexistent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
