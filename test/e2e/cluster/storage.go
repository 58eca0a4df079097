package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"crust.dev/crust/deploy"
)

// Driver is the name of the CSI driver.
const Driver = "csi.crust.dev"

// namespace is that of what serves the driver, and nodeAccount and controllerAccount the chart's service accounts there.
const (
	namespace         = "crust-system"
	nodeAccount       = "crust-node"
	controllerAccount = "crust-controller"
)

// values are what the chart is rendered with.
var values = map[string]any{
	"namespace": map[string]any{"create": true}, "snapshots": map[string]any{"enabled": true, "groups": true}, "snapshotMetadata": map[string]any{"enabled": true},
	"volumeSnapshotClasses": []any{
		map[string]any{"name": "crust"}, map[string]any{"name": "crust-filesystem", "consistency": "filesystem"},
		map[string]any{"name": "crust-backing-image", "type": "bi", "exportType": "qcow2"}, map[string]any{"name": "crust-backup", "keepBases": 2},
	},
	"runtimeClasses": []any{map[string]any{"name": "crust", "handler": "crust"}},
}

// groupClass is none of the chart's objects.
const groupClass = `apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshotClass
metadata: {name: crust}
driver: ` + Driver + `
deletionPolicy: Delete
`

// chart renders the chart and returns its objects, namespaces first, those that only helm runs left out.
func chart(values map[string]any) ([]unstructured.Unstructured, error) {
	templates, err := deploy.Render(namespace, values)
	if err != nil {
		return nil, err
	}
	var list []unstructured.Unstructured
	for _, t := range templates {
		for text := range strings.SplitSeq(t.Text, "\n---\n") {
			var object unstructured.Unstructured
			if err := yaml.Unmarshal([]byte(text), &object.Object); err != nil {
				return nil, fmt.Errorf("%s: %w", t.Name, err)
			}
			if _, hook := object.GetAnnotations()["helm.sh/hook"]; !hook && object.Object != nil {
				list = append(list, object)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b unstructured.Unstructured) int {
		return cmp.Compare(rank(a), rank(b))
	})
	return list, nil
}

func rank(object unstructured.Unstructured) int {
	if object.GetKind() == "Namespace" {
		return 0
	}
	return 1
}

func isWorkload(object unstructured.Unstructured) bool {
	return object.GetKind() == "DaemonSet" || object.GetKind() == "Deployment"
}

// applyAll gives objects to the API server.
func (c *Cluster) applyAll(ctx context.Context, objects []unstructured.Unstructured) error {
	var text strings.Builder
	for _, object := range objects {
		raw, err := yaml.Marshal(object.Object)
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "---\n%s", raw)
	}
	return c.Apply(ctx, text.String())
}

// installTypes installs the types that the chart needs, and objects that are none of its.
func (c *Cluster) installTypes(ctx context.Context) error {
	if err := c.applyTypes(ctx, "github.com/kubernetes-csi/external-snapshotter/client/v8", "groupsnapshot.storage.k8s.io", "snapshot.storage.k8s.io"); err != nil {
		return err
	}
	if err := c.applyTypes(ctx, "github.com/kubernetes-csi/external-snapshot-metadata/client", "cbt.storage.k8s.io"); err != nil {
		return err
	}
	return c.Apply(ctx, groupClass)
}

// account writes a file with which a service account reaches the API server.
func (c *Cluster) account(ctx context.Context, name string) (kubeconfig string, err error) {
	cmd := c.Kubectl(ctx, "--namespace", namespace, "create", "token", name, "--duration=24h")
	token, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("token of service account %s: %w", name, err)
	}
	kubeconfig = c.path(name + ".conf")
	return kubeconfig, writeKubeconfig(kubeconfig, c.server(), c.pki("ca.crt"), fmt.Sprintf("token: %q", strings.TrimSpace(string(token))))
}

// startStorage starts the driver, the daemon, and the sidecars, and installs their objects.
func (c *Cluster) startStorage(ctx context.Context) error {
	if err := c.makeGuestImage(ctx); err != nil {
		return err
	}
	var err error
	if c.Driver, err = c.start("crust-csi", nil, filepath.Join(c.ours, "crust-csi"), "--endpoint", "unix://"+c.path("csi.sock"), "--node-id", Node,
		"--pool", c.path("pool"), "--pool-size", "4Gi", "--crustd-endpoint", "unix://"+c.path("kep.sock"), "--image-allow-cidr", "127.0.0.0/8"); err != nil {
		return err
	}
	if err := c.Driver.await(ctx, listens(c.path("csi.sock"))); err != nil {
		return err
	}
	objects, err := chart(values)
	if err != nil {
		return err
	}
	// What the workloads would run are processes here, with the same service accounts.
	if err := errors.Join(c.installTypes(ctx), c.applyAll(ctx, slices.DeleteFunc(objects, isWorkload))); err != nil {
		return err
	}
	node, err := c.account(ctx, nodeAccount)
	if err != nil {
		return err
	}
	controller, err := c.account(ctx, controllerAccount)
	if err != nil {
		return err
	}
	if c.Daemon, err = c.start("crustd", nil, filepath.Join(c.ours, "crustd"), "--config", c.path("crustd.yaml")); err != nil {
		return err
	}
	if err := c.Daemon.await(ctx, listens(c.path("runtime.sock"))); err != nil {
		return err
	}
	if err := c.startSnapshotController(); err != nil {
		return err
	}
	socket := "--csi-address=" + c.path("csi.sock")
	for name, args := range map[string][]string{
		"csi-provisioner": {
			"--kubeconfig", node, socket, "--extra-create-metadata", "--node-deployment", "--strict-topology", "--immediate-topology=false",
			"--enable-capacity", "--capacity-ownerref-level=-1",
		},
		"csi-snapshotter": {"--kubeconfig", controller, socket, "--extra-create-metadata", "--feature-gates=CSIVolumeGroupSnapshot=true"},
		"csi-resizer":     {"--kubeconfig", controller, socket, "--handle-volume-inuse-error=false"},
		"csi-snapshot-metadata": {
			"--kubeconfig", controller, socket, "--port", c.port("snapshot-metadata"), "--tls-cert", c.pki("apiserver.crt"), "--tls-key", c.pki("apiserver.key"),
		},
	} {
		p, err := c.startKept(name, []string{"NODE_NAME=" + Node, "NAMESPACE=" + namespace}, append([]string{c.program(name)}, args...)...)
		if err != nil {
			return err
		}
		switch name {
		case "csi-provisioner":
			c.Provisioner = p
		case "csi-snapshotter":
			c.Snapshotter = p
		}
	}
	return nil
}

// startSnapshotController starts what a cluster has one of, whatever drivers it has.
func (c *Cluster) startSnapshotController() (err error) {
	c.SnapshotController, err = c.start("snapshot-controller", nil, c.program("snapshot-controller"), "--kubeconfig", c.Kubeconfig(), "--feature-gates=CSIVolumeGroupSnapshot=true")
	return err
}

// makeGuestImage makes the image that microVMs boot.
func (c *Cluster) makeGuestImage(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.ours, "crust-sandbox"), "image", "--agent", filepath.Join(c.ours, "crust-agent"), "--out", c.path("image"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("crust-sandbox image: %w: %s", err, out)
	}
	return nil
}

// applyTypes installs the custom resource definitions of some API groups, out of the module that has them, and waits until
// they are served. The version of the module is that of the sidecars.
func (c *Cluster) applyTypes(ctx context.Context, module string, groups ...string) error {
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	cmd.Dir = filepath.Join(c.root, "test/e2e/cluster/modules/sidecars")
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("find module %s: %w", module, err)
	}
	args := []string{"apply"}
	for _, group := range groups {
		files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "config/crd", group+"_*.yaml"))
		if err != nil {
			return err
		}
		if len(files) == 0 {
			return fmt.Errorf("module %s has no types of %s", module, group)
		}
		for _, f := range files {
			args = append(args, "-f", f)
		}
	}
	if out, err := c.Kubectl(ctx, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("apply types of %s: %w: %s", module, err, out)
	}
	args[0] = "wait"
	if out, err := c.Kubectl(ctx, append(args, "--for=condition=Established", "--timeout=1m")...).CombinedOutput(); err != nil {
		return fmt.Errorf("types of %s: %w: %s", module, err, out)
	}
	return nil
}

// listens returns a check whether somebody listens on a unix socket.
func listens(path string) func(context.Context) error {
	return func(ctx context.Context) error {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return err
		}
		return conn.Close()
	}
}
