package deploy_test

import (
	"encoding/json"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"crust.dev/crust/deploy"
)

// valueSets are what people install.
var valueSets = map[string]string{
	"defaults": `{}`,
	"everything off": `
controller: {enabled: false}
storageClasses: []
volumeSnapshotClasses: []
crustd: {runtimeClasses: {}, defaultPolicy: never}
driver: {metricsPort: 0}
node: {tolerations: [], maxUnavailable: 1}
uninstallCheck: {enabled: false}
`,
	"everything on": `
name: storage
driverName: storage.example.com
namespace: {create: true}
image: {registry: registry.example.com/storage, tag: "1.2.3", pullPolicy: Always}
imagePullSecrets: [pull]
kubeletDir: /var/lib/k0s/kubelet
log: {level: debug, format: text}
pool: {dir: /data/pool, imageSize: 20Gi}
crustd:
  stateDir: /data/crustd/journal
  runtimeClasses: {crust: remote, kata-qemu-runtime-rs: kata-rs, old: kep}
  handlers:
    - kind: remote
    - {kind: kata, name: kata-rs, runtime: rust, criEndpoint: "unix:///run/containerd/containerd.sock", hostAssist: [format, check, grow, chown], assistTimeout: 2m}
    - {kind: cli, name: kep, root: /run/crust/kep, timeout: 10s, capabilities: [format, group]}
driver:
  snapshotMetadataBlockSize: 1Mi
  images: {allowHosts: [images.example.com], allowCIDRs: [10.0.0.0/8], maxSize: 100Gi}
node:
  nodeSelector: {storage: "yes"}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: disk, operator: Exists}]}]}}}
  tolerations: [{key: dedicated, operator: Equal, value: storage, effect: NoSchedule}]
  podAnnotations: {example.com/note: "true"}
  podLabels: {team: storage}
sidecars:
  registry: registry.example.com/csi
  provisioner: {image: csi-provisioner:v6.3.0, extraArgs: ["--v=5"]}
snapshots: {enabled: true, groups: true}
storageClasses:
  - {name: all, fsType: xfs, defer: always, handler: kata-rs, fsGroupChangePolicy: OnRootMismatch, default: true, reclaimPolicy: Retain, volumeBindingMode: Immediate, allowVolumeExpansion: false, mountOptions: [noatime]}
volumeSnapshotClasses:
  - {name: all, type: snap, consistency: filesystem, keepBases: 3, deletionPolicy: Retain, default: true}
  - {name: image, type: bi, exportType: qcow2}
controller:
  replicas: 3
  routePort: 19812
  nodeSelector: {role: infra}
  tolerations: [{operator: Exists}]
  podAnnotations: {example.com/note: "true"}
  podLabels: {team: storage}
snapshotMetadata: {enabled: true, audience: backup, secrets: [credentials]}
runtimeClasses:
  - {name: crust, handler: crust}
  - {name: kata-qemu-runtime-rs, handler: kata-qemu-runtime-rs, overhead: {memory: 160Mi, cpu: 250m}, nodeSelector: {kata: "yes"}}
podMonitor: {enabled: true, interval: 1m, labels: {release: prometheus}}
networkPolicies: {enabled: true, metricsFrom: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]}
`,
	"no pod network": `
hostNetwork: true
apiServer: {host: 10.0.0.1}
snapshots: {enabled: true}
snapshotMetadata: {enabled: true}
`,
	"policies for nobody": `networkPolicies: {enabled: true}`,
	"snapshots by the nodes": `
controller: {enabled: false}
snapshots: {enabled: true, sidecar: node}
`,
	"certificates of one's own": `
controller: {tls: {source: secret, nodeSecret: nodes, routerSecret: routers}, podDisruptionBudget: {enabled: false}}
snapshots: {enabled: true}
snapshotMetadata: {enabled: true, tls: {source: secret, secret: backups, caCert: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}}
`,
}

func parse(t *testing.T, values string) map[string]any {
	t.Helper()
	var v map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &v); err != nil {
		t.Fatalf("%v in\n%s", err, values)
	}
	return v
}

// render renders a set of values.
func render(t *testing.T, values string) []object {
	t.Helper()
	templates, err := deploy.Render("crust-system", parse(t, values))
	if err != nil {
		t.Fatal(err)
	}
	var all []object
	for _, template := range templates {
		all = append(all, decode(t, template.Name, template.Text)...)
	}
	return all
}

// TestWrongValues are refused at install, by name.
func TestWrongValues(t *testing.T) {
	for _, row := range []struct{ name, values, want string }{
		{"an unknown value", `drivrName: x`, "drivrName"},
		{"an unknown value further down", `crustd: {polcy: auto}`, "polcy"},
		{"a number for a text", `driverName: 7`, "/driverName"},
		{"upper case in the driver's name", `driverName: CSI.crust.dev`, "/driverName"},
		{"a relative directory", `kubeletDir: var/lib/kubelet`, "/kubeletDir"},
		{"a directory that would end the line", `pool: {dir: "/a, /b"}`, "/pool/dir"},
		{"a journal in the root", `crustd: {stateDir: /state}`, "/crustd/stateDir"},
		{"a journal beside the kubelet's directory", `{kubeletDir: /data/kubelet, crustd: {stateDir: /data/state}}`, "crustd.stateDir /data/state"},
		{"a policy that there is not", `crustd: {defaultPolicy: always}`, "/crustd/defaultPolicy"},
		{"no handler", `crustd: {handlers: []}`, "/crustd/handlers"},
		{"a handler of an unknown kind", `crustd: {handlers: [{kind: gvisor}]}`, "/crustd/handlers/0"},
		{"a key of another kind of handler", `crustd: {handlers: [{kind: remote, hostAssist: [format]}]}`, "/crustd/handlers/0"},
		{"a filesystem that there is not", `storageClasses: [{name: a, fsType: btrfs}]`, "/storageClasses/0/fsType"},
		{"a class without a name", `storageClasses: [{fsType: xfs}]`, "name"},
		{"defer in other words", `storageClasses: [{name: a, defer: "yes"}]`, "/storageClasses/0/defer"},
		{"too many bases", `volumeSnapshotClasses: [{name: a, keepBases: 17}]`, "/volumeSnapshotClasses/0/keepBases"},
		{"bases of a backing image", `volumeSnapshotClasses: [{name: a, type: bi, keepBases: 1}]`, "/volumeSnapshotClasses/0/keepBases"},
		{"a size without a unit that there is", `pool: {imageSize: 10GB}`, "/pool/imageSize"},
		{"a port beyond the last", `crustd: {httpPort: 70000}`, "/crustd/httpPort"},
		{"half a digest", `image: {digest: "sha256:12"}`, "/image/digest"},
		{"a level of the log", `log: {level: loud}`, "/log/level"},
		{"arguments that are none", `sidecars: {provisioner: {image: a, extraArgs: [v=5]}}`, "/sidecars/provisioner/extraArgs/0"},
		{"a range that is an address", `driver: {images: {allowCIDRs: [10.0.0.1]}}`, "/driver/images/allowCIDRs/0"},
		{"a sidecar of snapshots elsewhere", `snapshots: {sidecar: cluster}`, "/snapshots/sidecar"},
		{"central snapshots without the controller", `{controller: {enabled: false}, snapshots: {enabled: true}}`, "set controller.enabled=true, or snapshots.sidecar=node"},
		{"group snapshots by the nodes", `snapshots: {enabled: true, groups: true, sidecar: node}`, "set snapshots.sidecar=controller, or snapshots.groups=false"},
		{"changed blocks without the controller", `{controller: {enabled: false}, snapshotMetadata: {enabled: true}}`, "/controller/enabled"},
		{"one's own certificate without its authority", `snapshotMetadata: {enabled: true, tls: {source: secret}}`, "/snapshotMetadata/tls/caCert"},
		{"an API server's address with its scheme", `apiServer: {host: "https://10.0.0.1"}`, "/apiServer/host"},
		{"no replica", `controller: {replicas: 0}`, "/controller/replicas"},
		{"everything at once", `networkPolicies: true`, "/networkPolicies"},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := deploy.Render("crust-system", parse(t, row.values))
			if err == nil {
				t.Fatal("it was taken")
			}
			// The schema's validator writes /a/b/0 as 'a.b.0' or with slashes, as its release will.
			text := strings.NewReplacer(".", "/", "'", "").Replace(err.Error())
			if !strings.Contains(text, strings.ReplaceAll(row.want, ".", "/")) {
				t.Errorf("%q is not in the message:\n%v", row.want, err)
			}
		})
	}
}

// TestEveryValueHasADefault: what the schema knows is in values.yaml, where people look for it.
func TestEveryValueHasADefault(t *testing.T) {
	chart, err := deploy.Chart()
	if err != nil {
		t.Fatal(err)
	}
	type node struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	seen := 0
	var check func(path string, schema json.RawMessage, value any)
	check = func(path string, schema json.RawMessage, value any) {
		var n node
		if err := json.Unmarshal(schema, &n); err != nil {
			t.Fatal(err)
		}
		values, _ := value.(map[string]any)
		for name, sub := range n.Properties {
			if path == "" && name == "global" {
				continue // helm's own
			}
			inner, ok := values[name]
			if !ok {
				t.Errorf("values.yaml has no %s%s", path, name)
			}
			seen++
			check(path+name+".", sub, inner)
		}
	}
	check("", chart.Schema, chart.Values)
	if seen < 70 {
		t.Errorf("the schema has only %d values", seen)
	}
}
