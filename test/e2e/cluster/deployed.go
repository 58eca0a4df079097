package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// images is the registry of the images that are made here; nothing is ever fetched from it.
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

// configureDeployed is configure for pods that have their sockets where the chart says.
func (c *Cluster) configureDeployed(ctx context.Context) error {
	c.runtimeSocket = filepath.Join(runDirectory, "runtime.sock")
	return c.configure(ctx)
}

// makeImages makes the images of the chart's pods and gives them to containerd.
func (c *Cluster) makeImages(ctx context.Context) error {
	if err := c.makeGuestImage(ctx); err != nil {
		return err
	}
	out := c.path("images")
	cmd := exec.CommandContext(ctx, "go", "run", "./deploy/images", "-o", out, "--arch", "amd64", "--name", images+"/crust-node:test")
	cmd.Dir = c.root
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("deploy/images: %w: %s", err, text)
	}
	archives, err := filepath.Glob(filepath.Join(out, "*.tar"))
	if err != nil {
		return err
	}
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
	return os.RemoveAll(out)
}

// deploy installs the chart. Two things differ from an installation elsewhere: pods are on the host's network, because there
// is no other here, and reach the API server by its port on loopback.
func (c *Cluster) deploy(ctx context.Context) error {
	if _, err := os.Stat(runDirectory); err == nil {
		return fmt.Errorf("%s is there already; something of CRuSt runs on this machine, or has left it: remove it first", runDirectory)
	}
	c.owned = append(c.owned, runDirectory)
	// State and pool have a directory that the kubelet's is not in, as in the chart's defaults: the parent of the state is
	// mounted into crustd's container, and everything that is mounted there at that moment with it.
	v := maps.Clone(values)
	maps.Copy(v, map[string]any{
		"image":      map[string]any{"registry": images, "repository": "crust-node", "tag": "test"},
		"kubeletDir": c.path("kubelet"), "pool": map[string]any{"dir": c.path("crust", "pool"), "imageSize": "4Gi"},
		"crustd":     map[string]any{"stateDir": c.path("crust", "state")},
		"sidecars":   map[string]any{"registry": images},
		"controller": map[string]any{"replicas": 1},
		"driver":     map[string]any{"images": map[string]any{"allowCIDRs": []any{"127.0.0.0/8"}}},
	})
	objects, err := chart(v)
	if err != nil {
		return err
	}
	for i := range objects {
		if isWorkload(objects[i]) {
			if err := c.onHostNetwork(&objects[i]); err != nil {
				return err
			}
		}
	}
	if err := errors.Join(c.installTypes(ctx), c.applyAll(ctx, objects)); err != nil {
		return err
	}
	if _, err := c.start("snapshot-controller", nil, c.program("snapshot-controller"), "--kubeconfig", c.Kubeconfig(), "--enable-distributed-snapshotting"); err != nil {
		return err
	}
	for _, workload := range []string{"daemonset/crust-node", "deployment/crust-controller"} {
		if out, err := c.Kubectl(ctx, "--namespace", namespace, "rollout", "status", workload, "--timeout=4m").CombinedOutput(); err != nil {
			pods, _ := c.Kubectl(ctx, "--namespace", namespace, "describe", "pods").CombinedOutput()
			return fmt.Errorf("%s: %w: %s\n%s", workload, err, out, pods)
		}
	}
	return nil
}

// onHostNetwork changes a workload's pods.
func (c *Cluster) onHostNetwork(object *unstructured.Unstructured) error {
	template, _, err := unstructured.NestedMap(object.Object, "spec", "template")
	if err != nil {
		return err
	}
	var pod corev1.PodTemplateSpec
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(template, &pod); err != nil {
		return err
	}
	pod.Spec.HostNetwork = true
	for i := range pod.Spec.Containers {
		container := &pod.Spec.Containers[i]
		container.Env = append(container.Env, corev1.EnvVar{Name: "KUBERNETES_SERVICE_HOST", Value: "127.0.0.1"},
			corev1.EnvVar{Name: "KUBERNETES_SERVICE_PORT", Value: c.port("apiserver")})
	}
	if template, err = runtime.DefaultUnstructuredConverter.ToUnstructured(&pod); err != nil {
		return err
	}
	return unstructured.SetNestedMap(object.Object, template, "spec", "template")
}
