package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// kubeletConfig is for a machine where Kubernetes is a guest: no control groups of its own, no eviction, whatever cgroups
// there are. A kubelet looks at its pods once in a minute otherwise, and at their volumes too: that is what an expansion waits for.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
port: @KUBELET@
healthzPort: 0
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: @DIR@/pki/ca.crt}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix://@DIR@/containerd.sock
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%", imagefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
volumeStatsAggPeriod: 10s
syncFrequency: 10s
runtimeRequestTimeout: 10m
`

// containerdConfig: without CAP_SYS_RESOURCE nobody may lower an OOM score, hence restrict_oom_score_adj.
const containerdConfig = `version = 3
root = "@DIR@/containerd"
state = "@DIR@/cd"
[grpc]
  address = "@DIR@/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "` + Image + `"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "@DIR@/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = "runc"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crust]
  runtime_type = "io.containerd.crust.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crust.options]
  TypeUrl = "runtimeoptions.v1.Options"
  ConfigPath = "@DIR@/shim.yaml"
`

const shimConfig = `image: @DIR@/image
accelCache: @DIR@/accel.json
runtimeEndpoint: unix://@RUNTIME@
sandboxes: @SANDBOXES@
rootBytes: 268435456
`

const crustdConfig = `drivers:
- {endpoint: "unix://@DIR@/kubelet/plugins/crust/csi.sock", upstream: "unix://@DIR@/csi.sock", register: true}
runtimeEndpoint: unix://@RUNTIME@
kepEndpoint: unix://@DIR@/kep.sock
adminEndpoint: unix://@DIR@/admin.sock
registrationDir: @DIR@/kubelet/plugins_registry
stateDir: @DIR@/state
policy: {default: auto}
runtimeClasses: {crust: remote}
kubernetes: {kubeconfig: @DIR@/` + nodeAccount + `.conf, node: ` + Node + `}
log: {level: debug}
`

// share makes the cluster's directory a shared mount, as systemd has it with the root of a node: pods of the chart mount in it, and
// a kubelet that finds it private mounts its own directory over itself, and so over what crustd has mounted there before.
func (c *Cluster) share() error {
	if err := unix.Mount(c.Dir, c.Dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", c.Dir, err)
	}
	if err := unix.Mount("", c.Dir, "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("share %s: %w", c.Dir, err)
	}
	return nil
}

// configure writes keys and configuration files.
func (c *Cluster) configure(context.Context) error {
	if err := c.share(); err != nil {
		return err
	}
	a, err := newAuthority(c.path("pki"))
	if err != nil {
		return err
	}
	_, err = a.newKey("accounts")
	err = errors.Join(err,
		a.issue("apiserver", "kube-apiserver"),
		a.issue("admin", "admin", "system:masters"),
		a.issue("kubelet", "system:node:"+Node, "system:nodes"),
		a.kubeconfig(c.Kubeconfig(), "admin", c.server()),
		a.kubeconfig(c.path("kubelet.conf"), "kubelet", c.server()))
	fill := strings.NewReplacer("@DIR@", c.Dir, "@RUNTIME@", c.runtimeSocket, "@SANDBOXES@", c.sandboxes, "@KUBELET@", c.port("kubelet"))
	for name, text := range map[string]string{
		"kubelet.yaml": kubeletConfig, "containerd.toml": containerdConfig, "shim.yaml": shimConfig, "crustd.yaml": crustdConfig,
		"cni/loopback.conflist": `{"cniVersion": "1.0.0", "name": "loopback", "plugins": [{"type": "loopback"}]}`,
	} {
		err = errors.Join(err, os.WriteFile(c.path(name), []byte(fill.Replace(text)), 0o600))
	}
	return err
}
