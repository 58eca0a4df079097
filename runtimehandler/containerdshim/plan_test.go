package containerdshim

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"crust.dev/crust/runtimehandler/shim"
)

const pods = "/var/lib/kubelet/pods/0a1b"

// bind is a mount as the kubelet has containerd make it.
func bind(source, destination string, options ...string) specs.Mount {
	return specs.Mount{Type: "bind", Source: source, Destination: destination, Options: append([]string{"rbind", "rprivate"}, options...)}
}

func TestPlanMounts(t *testing.T) {
	for name, tc := range map[string]struct {
		mount    specs.Mount
		deferral bool
		want     plan
		refused  bool
	}{
		"a deferred volume": {
			mount: bind(pods+"/volumes/kubernetes.io~csi/pv/mount", "/data/", "rw"), deferral: true,
			want: plan{volumes: []shim.Mount{{Type: "bind", Source: pods + "/volumes/kubernetes.io~csi/pv/mount", Destination: "/data", Options: []string{"rbind", "rprivate", "rw"}}}},
		},
		"a volume that nobody has deferred":                {mount: bind(pods+"/volumes/kubernetes.io~csi/pv/mount", "/data"), refused: true},
		"a directory of the host":                          {mount: bind("/srv", "/srv"), refused: true},
		"a directory of the host, read-only, is no better": {mount: bind("/srv", "/srv", "ro"), refused: true},
		"a part of an emptyDir":                            {mount: bind(pods+"/volume-subpaths/tmp/c/0", "/tmp"), refused: true},
		"what only looks like the kubelet's":               {mount: bind("/pods/volumes/kubernetes.io~empty-dir", "/x"), refused: true},
		"proc":                                             {mount: specs.Mount{Type: "proc", Source: "proc", Destination: "/proc"}},
		"dev":                                              {mount: specs.Mount{Type: "tmpfs", Source: "tmpfs", Destination: "/dev"}},
		"shared memory":                                    {mount: bind("/run/containerd/x/shm", "/dev/shm")},
		"an emptyDir": {
			mount: bind(pods+"/volumes/kubernetes.io~empty-dir/scratch", "/scratch", "rw"),
			want:  plan{shared: []shared{{"empty-dir-scratch", "/scratch", false}}},
		},
		"an emptyDir that is read-only for this container": {
			mount: bind(pods+"/volumes/kubernetes.io~empty-dir/scratch", "/scratch", "ro"),
			want:  plan{shared: []shared{{"empty-dir-scratch", "/scratch", true}}},
		},
		"a tmpfs": {mount: specs.Mount{Type: "tmpfs", Destination: "/run"}, want: plan{shared: []shared{{"0123456789abcdef-0", "/run", false}}}},
		"a secret is read-only whatever the options say": {
			mount: bind(pods+"/volumes/kubernetes.io~secret/s", "/s", "rw"),
			want:  plan{copies: []copied{{pods + "/volumes/kubernetes.io~secret/s", "/s", true}}},
		},
		"a file of a config map": {
			mount: bind(pods+"/volumes/kubernetes.io~configmap/c/key", "/etc/key"),
			want:  plan{copies: []copied{{pods + "/volumes/kubernetes.io~configmap/c/key", "/etc/key", true}}},
		},
		"hosts": {mount: bind(pods+"/etc-hosts", "/etc/hosts"), want: plan{copies: []copied{{pods + "/etc-hosts", "/etc/hosts", false}}}},
		"a termination message": {
			mount: bind(pods+"/containers/main/0f00", "/my/log"),
			want:  plan{copies: []copied{{pods + "/containers/main/0f00", "/my/log", false}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var deferrals []int
			if tc.deferral {
				deferrals = []int{0}
			}
			got, err := planMounts("0123456789abcdef0123", []specs.Mount{tc.mount}, deferrals)
			if tc.refused {
				if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), tc.mount.Source) || !strings.Contains(err.Error(), "crust.dev/defer") {
					t.Errorf("not refused, or not with the mount and the cure: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(plan{}, copied{}, shared{})); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestReadOnly(t *testing.T) {
	for options, want := range map[string]bool{"": false, "ro": true, "rw": false, "ro,rw": false, "rw,ro": true, "ro,rw,ro": true} {
		if got := readOnly(strings.Split(options, ",")); got != want {
			t.Errorf("%q: %v", options, got)
		}
	}
}

func TestCheckSpec(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*specs.Spec)
		says   string
	}{
		"a pod on the host's network": {change: func(*specs.Spec) {}},
		"a pod with a network":        {func(s *specs.Spec) { s.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.NetworkNamespace}} }, "hostNetwork: true"},
		"a terminal":                  {func(s *specs.Spec) { s.Process.Terminal = true }, "tty"},
		"a block device": {func(s *specs.Spec) {
			delete(s.Annotations, annotationType)
			s.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/x", Type: "b"}}
		}, "volumeMode"},
		"a specification of something": {func(s *specs.Spec) { s.Linux = nil }, "linux"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &specs.Spec{Process: &specs.Process{}, Root: &specs.Root{}, Linux: &specs.Linux{}, Annotations: map[string]string{annotationType: typeSandbox}}
			tc.change(s)
			err := checkSpec(s)
			if tc.says == "" && err != nil || tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("%v, want %q", err, tc.says)
			}
		})
	}
}
