package cluster

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// images is the registry that the images which are made here are named after; nothing is ever fetched from it.
const images = "crust.dev/test"

// The sidecars' programs, by the names that their images have in the chart.
var sidecars = []string{"csi-provisioner:v6.3.0", "csi-resizer:v2.3.0", "csi-snapshotter:v8.7.0", "csi-snapshot-metadata:v1.0.0"}

// runDirectory is where the chart's pods have their sockets, and where shims look for crustd's.
const runDirectory = "/run/crust"

// StartDeployed is Start with the storage as users install it: the chart, whose pods run the images of this project and of the
// sidecars. It uses the host's /run/crust, so there can be one at a time.
func StartDeployed(ctx context.Context, root, bin, dir string, progress io.Writer) (*Cluster, error) {
	return start(ctx, root, bin, dir, progress,
		stage{"configuration", (*Cluster).configureDeployed},
		stage{"images", (*Cluster).makeImages},
		stage{"the chart's pods", (*Cluster).deploy})
}

// configureDeployed is configure for pods that have their sockets, and see those of sandboxes, where the chart says.
func (c *Cluster) configureDeployed(ctx context.Context) error {
	c.runtimeSocket, c.sandboxes = filepath.Join(runDirectory, "runtime.sock"), filepath.Join(runDirectory, "sandboxes")
	return c.configure(ctx)
}

// makeImages makes the images of the chart's pods and gives them to containerd.
func (c *Cluster) makeImages(ctx context.Context) error {
	if err := c.makeGuestImage(ctx); err != nil {
		return err
	}
	out := filepath.Dir(c.nodeImage())
	if err := goTool(ctx, c.root, "run", "-trimpath", "./deploy/images", "-o", out, "--arch", "amd64", "--name", images+"/crust-node:test"); err != nil {
		return err
	}
	archives := []string{c.nodeImage()}
	for _, image := range sidecars {
		name, _, _ := strings.Cut(image, ":")
		archive := filepath.Join(out, name+".sidecar")
		if err := writeProgramImage(archive, images+"/"+image, c.program(name)); err != nil {
			return err
		}
		archives = append(archives, archive)
	}
	for _, archive := range archives {
		if err := c.ctr(ctx, "--namespace", "k8s.io", "image", "import", archive); err != nil {
			return err
		}
	}
	return nil
}

// nodeImage is the archive that `make images` makes.
func (c *Cluster) nodeImage() string { return c.path("images", "crust-node.tar") }

// deploy installs the chart, with helm, as docs/install.md says.
func (c *Cluster) deploy(ctx context.Context) error {
	if _, err := os.Stat(runDirectory); err == nil {
		return fmt.Errorf("%s is there already; something of CRuSt runs on this machine, or has left it: remove it first", runDirectory)
	}
	c.owned = append(c.owned, runDirectory)
	port, err := strconv.Atoi(c.port("apiserver"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(c.pki("ca.crt"))
	if err != nil {
		return err
	}
	c.ports["snapshot-metadata"] = 50051 // the container's, in the chart
	// State and pool have a directory that the kubelet's is not in, as in the chart's defaults: the parent of the state is
	// mounted into crustd's container, and everything that is mounted there at that moment with it.
	v := maps.Clone(values)
	maps.Copy(v, map[string]any{
		"namespace":  map[string]any{"create": false},
		"image":      map[string]any{"registry": images, "repository": "crust-node", "tag": "test"},
		"kubeletDir": c.path("kubelet"), "pool": map[string]any{"dir": c.path("crust", "pool"), "imageSize": "8Gi"},
		"crustd":     map[string]any{"stateDir": c.path("crust", "state")},
		"sidecars":   map[string]any{"registry": images},
		"controller": map[string]any{"replicas": 1},
		"driver":     map[string]any{"images": map[string]any{"allowCIDRs": []any{"127.0.0.0/8"}}},
		// There is no network here but the host's, and nothing that serves Services.
		"snapshotMetadata": map[string]any{"enabled": true, "tls": map[string]any{"source": "secret", "secret": "metadata", "caCert": string(ca)}},
		"hostNetwork":      true, "apiServer": map[string]any{"host": "127.0.0.1", "port": port},
	})
	raw, err := yaml.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.valuesFile(), raw, 0o600); err != nil {
		return err
	}
	if err := c.installTypes(ctx); err != nil {
		return err
	}
	if err := c.startSnapshotController(); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"create", "namespace", namespace},
		{"label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged"},
		{"--namespace", namespace, "create", "secret", "tls", "metadata", "--cert", c.pki("apiserver.crt"), "--key", c.pki("apiserver.key")},
	} {
		if out, err := c.Kubectl(ctx, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return c.install(ctx)
}

func (c *Cluster) valuesFile() string { return c.path("values.yaml") }

// Helm returns a command of helm as administrator, in the namespace of the release.
func (c *Cluster) Helm(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.program("helm"), append(args, "--kubeconfig", c.Kubeconfig(), "--namespace", namespace)...)
	cmd.Env = os.Environ()
	for _, what := range []string{"CACHE", "CONFIG", "DATA"} {
		cmd.Env = append(cmd.Env, "HELM_"+what+"_HOME="+c.path("helm"))
	}
	return cmd
}

// install installs the chart and waits until its pods are ready. helm is content with a DaemonSet of which one pod is not, by its
// maxUnavailable, and that is all of them on one node.
func (c *Cluster) install(ctx context.Context) error {
	out, err := c.Helm(ctx, "install", "crust", filepath.Join(c.root, "deploy/helm/crust"), "--values", c.valuesFile(), "--wait", "--timeout", "4m").CombinedOutput()
	if err != nil {
		pods, _ := c.Kubectl(ctx, "--namespace", namespace, "describe", "pods").CombinedOutput()
		return fmt.Errorf("helm install: %w: %s\n%s", err, out, pods)
	}
	if out, err := c.Kubectl(ctx, "--namespace", namespace, "rollout", "status", "daemonset/crust-node", "--timeout=4m").CombinedOutput(); err != nil {
		return fmt.Errorf("the node's pods are not ready: %w: %s", err, out)
	}
	return nil
}
