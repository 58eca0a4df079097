package deploy_test

import (
	"bytes"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	metadatav1 "github.com/kubernetes-csi/external-snapshot-metadata/client/apis/snapshotmetadataservice/v1beta1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"crust.dev/crust/crust/configfile"
	"crust.dev/crust/deploy"
)

func jobTemplate(o object) (corev1.PodTemplateSpec, bool) {
	job, ok := o.Object.(*batchv1.Job)
	if !ok {
		return corev1.PodTemplateSpec{}, false
	}
	return job.Spec.Template, true
}

// TestRender: every object is one of Kubernetes', has a name that no other has, and labels, and is in the namespace.
func TestRender(t *testing.T) {
	for name, values := range valueSets {
		t.Run(name, func(t *testing.T) {
			seen := map[string]bool{}
			for _, o := range render(t, values) {
				key := cmp.Or(o.kind(), "?") + "/" + o.meta().GetNamespace() + "/" + o.meta().GetName()
				if seen[key] {
					t.Errorf("%s is there twice", key)
				}
				seen[key] = true
				if ns := o.meta().GetNamespace(); ns != "" && ns != "crust-system" {
					t.Errorf("%s is in the namespace %s", o, ns)
				}
				for _, label := range []string{"app.kubernetes.io/name", "app.kubernetes.io/component", "app.kubernetes.io/version"} {
					if o.meta().GetLabels()[label] == "" {
						t.Errorf("%s has no label %s", o, label)
					}
				}
			}
			if !seen["DaemonSet/crust-system/crust-node"] && !seen["DaemonSet/crust-system/storage-node"] {
				t.Errorf("there is no DaemonSet among %v", seen)
			}
		})
	}
}

// TestPods: pods are whole, whatever the values are: their volumes and ports are there, selectors find them, and what they
// refer to is rendered, too.
func TestPods(t *testing.T) {
	for name, values := range valueSets {
		t.Run(name, func(t *testing.T) {
			objects := render(t, values)
			all := pods(objects)
			for owner, pod := range all {
				checkVolumes(t, owner, pod.Spec)
				if !slices.ContainsFunc(of[*corev1.ServiceAccount](objects), func(a *corev1.ServiceAccount) bool { return a.Name == pod.Spec.ServiceAccountName }) {
					t.Errorf("%s: there is no service account %q", owner, pod.Spec.ServiceAccountName)
				}
			}
			selects := func(what string, s *metav1.LabelSelector) {
				t.Helper()
				selector, err := metav1.LabelSelectorAsSelector(s)
				if err != nil {
					t.Fatal(err)
				}
				found := 0
				for _, pod := range all {
					if !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
						found++
					}
				}
				if found != 1 {
					t.Errorf("%s selects %d kinds of pods", what, found)
				}
			}
			for _, d := range of[*appsv1.DaemonSet](objects) {
				selects(d.Name, d.Spec.Selector)
			}
			for _, d := range of[*appsv1.Deployment](objects) {
				selects(d.Name, d.Spec.Selector)
			}
			for _, p := range of[*policyv1.PodDisruptionBudget](objects) {
				selects(p.Name, p.Spec.Selector)
			}
			for _, p := range of[*networkingv1.NetworkPolicy](objects) {
				selects(p.Name, &p.Spec.PodSelector)
			}
			for _, s := range of[*corev1.Service](objects) {
				selects(s.Name, &metav1.LabelSelector{MatchLabels: s.Spec.Selector})
			}
		})
	}
}

func checkVolumes(t *testing.T, owner string, pod corev1.PodSpec) {
	t.Helper()
	used, ports := map[string]bool{}, map[string]bool{}
	for _, c := range pod.Containers {
		if c.Resources.Requests.Cpu().IsZero() || c.Resources.Limits.Memory().IsZero() {
			t.Errorf("%s: container %s has no request of processor time, or no limit of memory", owner, c.Name)
		}
		for _, p := range c.Ports {
			ports[p.Name] = true
		}
		for _, m := range c.VolumeMounts {
			used[m.Name] = true
			if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
				t.Errorf("%s: container %s mounts the volume %s, which is not there", owner, c.Name, m.Name)
			}
			privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
			if m.MountPropagation != nil && *m.MountPropagation == corev1.MountPropagationBidirectional && !privileged {
				t.Errorf("%s: container %s propagates mounts without being privileged: the API server refuses that", owner, c.Name)
			}
		}
		for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
			if p != nil && p.HTTPGet != nil && p.HTTPGet.Port.StrVal != "" && !ports[p.HTTPGet.Port.StrVal] {
				t.Errorf("%s: a probe of container %s asks port %s, which is not there", owner, c.Name, p.HTTPGet.Port.StrVal)
			}
		}
	}
	for _, v := range pod.Volumes {
		if !used[v.Name] {
			t.Errorf("%s: nobody mounts the volume %s", owner, v.Name)
		}
	}
}

// TestOnlyTheNodeIsPrivileged: crustd and crust-csi on the nodes are, and nobody else has anything of the host.
func TestOnlyTheNodeIsPrivileged(t *testing.T) {
	privileged := []string{"crustd", "crust-csi"}
	for owner, pod := range pods(render(t, valueSets["everything on"])) {
		node := strings.HasSuffix(owner, "-node")
		if pod.Spec.HostNetwork || pod.Spec.HostIPC || pod.Spec.HostPID != node {
			t.Errorf("%s: host network %t, IPC %t, processes %t", owner, pod.Spec.HostNetwork, pod.Spec.HostIPC, pod.Spec.HostPID)
		}
		for _, v := range pod.Spec.Volumes {
			if v.HostPath != nil && !node {
				t.Errorf("%s has the host's %s", owner, v.HostPath.Path)
			}
		}
		for _, c := range pod.Spec.Containers {
			s := c.SecurityContext
			switch {
			case s == nil:
				t.Errorf("%s: container %s has no security context", owner, c.Name)
			case !node && !nobody(pod.Spec.SecurityContext, s):
				t.Errorf("%s: container %s runs as root", owner, c.Name)
			case node && slices.Contains(privileged, c.Name):
			case s.Privileged != nil && *s.Privileged, s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation,
				s.Capabilities == nil || !slices.Contains(s.Capabilities.Drop, "ALL") || len(s.Capabilities.Add) > 0,
				s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem:
				t.Errorf("%s: container %s may more than it needs: %+v", owner, c.Name, s)
			}
		}
	}
}

// nobody says whether a container is known not to run as root.
func nobody(pod *corev1.PodSecurityContext, c *corev1.SecurityContext) bool {
	return c.RunAsNonRoot != nil && *c.RunAsNonRoot || pod != nil && pod.RunAsNonRoot != nil && *pod.RunAsNonRoot
}

// TestCertificates: both ends of a route believe each other, and nobody else; backup programs can check whom they talk to.
func TestCertificates(t *testing.T) {
	objects := render(t, `{snapshotMetadata: {enabled: true}}`)
	secrets := map[string]*corev1.Secret{}
	for _, s := range of[*corev1.Secret](objects) {
		secrets[s.Name] = s
	}
	for _, row := range []struct{ secret, ca, host, stranger string }{
		{"crust-route-node", "crust-route-router", "node.csi.crust.dev", "router.csi.crust.dev"},
		{"crust-route-router", "crust-route-node", "router.csi.crust.dev", "node.csi.crust.dev"},
		{"crust-snapshot-metadata-tls", "crust-snapshot-metadata-tls", "crust-snapshot-metadata.crust-system.svc", "csi.crust.dev"},
	} {
		own, other := secrets[row.secret], secrets[row.ca]
		if own == nil || other == nil {
			t.Fatalf("%s or %s is not there", row.secret, row.ca)
		}
		pair, err := tls.X509KeyPair(own.Data["tls.crt"], own.Data["tls.key"])
		if err != nil {
			t.Fatalf("%s: %v", row.secret, err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(other.Data["ca.crt"]) {
			t.Fatalf("%s has no authority", row.ca)
		}
		for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
			if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: row.host, Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
				t.Errorf("%s: %v", row.secret, err)
			}
			if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: row.stranger, Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}}); err == nil {
				t.Errorf("%s: its certificate is for %s, too", row.secret, row.stranger)
			}
		}
		if len(own.Data) != 3 {
			t.Errorf("%s has more than certificate, key and authority: %d", row.secret, len(own.Data))
		}
	}
	services := of[*metadatav1.SnapshotMetadataService](objects)
	if len(services) != 1 || services[0].Name != "csi.crust.dev" || !bytes.Equal(services[0].Spec.CACert, secrets["crust-snapshot-metadata-tls"].Data["ca.crt"]) {
		t.Errorf("backup programs are told something else: %+v", services)
	}
}

// TestCSIDriver has the fields that can never be changed, and those that a deferral depends on.
func TestCSIDriver(t *testing.T) {
	drivers := of[*storagev1.CSIDriver](render(t, `{}`))
	if len(drivers) != 1 {
		t.Fatalf("there are %d CSIDrivers", len(drivers))
	}
	yes, no, file := true, false, storagev1.FileFSGroupPolicy
	want := storagev1.CSIDriverSpec{
		AttachRequired: &no, PodInfoOnMount: &yes, FSGroupPolicy: &file, SELinuxMount: &no, RequiresRepublish: &no, StorageCapacity: &yes,
		VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent},
	}
	if diff := gocmp.Diff(want, drivers[0].Spec); diff != "" {
		t.Errorf("-want +is\n%s", diff)
	}
}

// TestSnapshotter: there is one for the cluster or one for each node, and never both.
func TestSnapshotter(t *testing.T) {
	for values, want := range map[string]map[string][]string{
		`{}`:                         {},
		`snapshots: {groups: true}`:  {},
		`snapshots: {enabled: true}`: {"crust-controller": {"--leader-election=true", "--csi-address=/csi/csi.sock", "--feature-gates=CSIVolumeGroupSnapshot=false"}},
		`snapshots: {enabled: true, groups: true}`:                                  {"crust-controller": {"--leader-election=true", "--feature-gates=CSIVolumeGroupSnapshot=true"}},
		`snapshots: {enabled: true, sidecar: node}`:                                 {"crust-node": {"--node-deployment=true", "--csi-address=/run/crust/csi.sock", "--feature-gates=CSIVolumeGroupSnapshot=false"}},
		`{snapshots: {enabled: true, sidecar: node}, controller: {enabled: false}}`: {"crust-node": {"--node-deployment=true"}},
	} {
		is := map[string][]string{}
		for owner, pod := range pods(render(t, values)) {
			for _, c := range pod.Spec.Containers {
				if c.Name == "csi-snapshotter" {
					is[owner] = c.Args
					if central := owner == "crust-controller"; central != (c.LivenessProbe != nil) || central == slices.Contains(c.Args, "--node-deployment=true") {
						t.Errorf("%s: in %s it is started with %v, probed by %v", values, owner, c.Args, c.LivenessProbe)
					}
				}
			}
		}
		if !slices.Equal(slices.Sorted(maps.Keys(is)), slices.Sorted(maps.Keys(want))) {
			t.Errorf("%s: it is in %v", values, is)
		}
		for owner, args := range want {
			for _, arg := range args {
				if !slices.Contains(is[owner], arg) {
					t.Errorf("%s: in %s it is started with %v, without %s", values, owner, is[owner], arg)
				}
			}
		}
	}
}

// TestTheRouterIsProbed: the program that is probed with is the one that runs, and the socket is the one that it serves.
func TestTheRouterIsProbed(t *testing.T) {
	for _, c := range pods(render(t, `{}`))["crust-controller"].Spec.Containers {
		if c.Name != "router" {
			continue
		}
		if c.LivenessProbe == nil || c.LivenessProbe.Exec == nil {
			t.Fatal("it is not")
		}
		argv := c.LivenessProbe.Exec.Command
		if len(argv) != 3 || argv[0] != c.Command[0] || argv[1] != "probe" || !slices.Contains(c.Args, argv[2]) {
			t.Errorf("%v is probed by %v", c.Args, argv)
		}
		return
	}
	t.Error("there is no router")
}

// TestConfiguration: crustd starts with the file that the chart makes, as far as that can be seen without a node.
func TestConfiguration(t *testing.T) {
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range valueSets {
		t.Run(name, func(t *testing.T) {
			maps := of[*corev1.ConfigMap](render(t, values))
			if len(maps) != 1 {
				t.Fatalf("there are %d ConfigMaps", len(maps))
			}
			dir := t.TempDir()
			path, kubeconfig := filepath.Join(dir, "crustd.yaml"), filepath.Join(dir, "kubeconfig")
			// Here is no service account; everything else stays as it is.
			text := strings.Replace(maps[0].Data["crustd.yaml"], "kubernetes: {}", "kubernetes: {kubeconfig: "+kubeconfig+", node: n}", 1)
			const anywhere = "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"https://127.0.0.1:1\"}}]\n" +
				"contexts: [{name: c, context: {cluster: c, user: u}}]\ncurrent-context: c\nusers: [{name: u, user: {}}]\n"
			if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.WriteFile(kubeconfig, []byte(anywhere), 0o600)); err != nil {
				t.Fatal(err)
			}
			file, err := configfile.Read(path)
			if err != nil {
				t.Fatalf("%v in\n%s", err, text)
			}
			if file.Kubernetes == nil || len(file.Drivers) != 1 || !file.Drivers[0].Register || len(file.Handlers) == 0 {
				t.Errorf("it is not what a cluster needs: %+v", file)
			}
			// It may find that this machine is no node; the configuration is valid all the same.
			out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "crustd"), "--check-config", "--config", path).CombinedOutput()
			if !strings.Contains(string(out), "the configuration is valid") {
				t.Errorf("crustd --check-config: %v: %s in\n%s", err, out, text)
			}
		})
	}
}

// TestManifests: what is committed is what the chart makes.
func TestManifests(t *testing.T) {
	want, err := deploy.Manifests()
	if err != nil {
		t.Fatal(err)
	}
	const dir = "../../deploy/manifests"
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if _, ok := want[e.Name()]; !ok {
			t.Errorf("%s is of no use any more; make manifests removes it", e.Name())
		}
	}
	for name, text := range want {
		is, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		} else if diff := gocmp.Diff(string(is), text); diff != "" {
			t.Errorf("%s is not what the chart makes; run make manifests (-is +chart)\n%s", name, diff)
		}
		if len(decode(t, name, text)) == 0 {
			t.Errorf("%s is empty", name)
		}
	}
}

// TestNoPodNetwork: every pod is on its node's network, and all programs that talk to the API server are told where it is.
func TestNoPodNetwork(t *testing.T) {
	objects := render(t, valueSets["no pod network"])
	for _, d := range of[*appsv1.Deployment](objects) {
		if r := d.Spec.Strategy.RollingUpdate; r == nil || r.MaxSurge.String() != "0" || r.MaxUnavailable.String() != "1" {
			t.Errorf("%s: a new pod would wait for the ports of an old one: %+v", d.Name, r)
		}
	}
	for owner, pod := range pods(objects) {
		if !pod.Spec.HostNetwork {
			t.Errorf("%s is on a pod network", owner)
		}
		for _, c := range pod.Spec.Containers {
			told := map[string]string{}
			for _, e := range c.Env {
				told[e.Name] = e.Value
			}
			// crust-csi on a node does not know that there is a Kubernetes.
			if c.Name != "crust-csi" && (told["KUBERNETES_SERVICE_HOST"] != "10.0.0.1" || told["KUBERNETES_SERVICE_PORT"] != "6443") {
				t.Errorf("%s: container %s is told %v", owner, c.Name, told)
			}
		}
	}
}

// TestUninstallHook: helm runs the check before anything is removed, with rights that are there by then, and shows what it says.
func TestUninstallHook(t *testing.T) {
	hooks := map[string]map[string]string{}
	for _, o := range render(t, `{}`) {
		if a := o.meta().GetAnnotations(); a["helm.sh/hook"] != "" {
			hooks[o.kind()] = a
		} else if strings.HasSuffix(o.meta().GetName(), "-uninstall-check") {
			t.Errorf("%s is no hook: it would be removed before it is needed", o)
		}
	}
	for _, kind := range []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"} {
		switch a := hooks[kind]; {
		case a["helm.sh/hook"] != "pre-delete":
			t.Errorf("%s: %v", kind, a)
		case kind != "Job" && a["helm.sh/hook-weight"] != "-1":
			t.Errorf("the %s is not there before the Job: %v", kind, a)
		case kind == "Job" && a["helm.sh/hook-output-log-policy"] != "hook-failed":
			t.Errorf("the list would not be seen: %v", a)
		}
	}
	for _, o := range render(t, `uninstallCheck: {enabled: false}`) {
		if o.meta().GetAnnotations()["helm.sh/hook"] != "" {
			t.Errorf("%s is there although it is turned off", o)
		}
	}
}
