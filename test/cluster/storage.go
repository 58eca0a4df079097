package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
)

// Driver is the name of the CSI driver.
const Driver = "csi.crust.dev"

// storageObjects are what an administrator installs.
const storageObjects = `apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: ` + Driver + `}
spec: {attachRequired: false, podInfoOnMount: true, fsGroupPolicy: File, volumeLifecycleModes: [Persistent], seLinuxMount: false}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: crust}
handler: crust
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: crust}
provisioner: ` + Driver + `
allowVolumeExpansion: true
volumeBindingMode: Immediate
parameters: {csi.storage.k8s.io/fstype: ext4}
`

// startStorage starts the driver, the daemon, and the sidecars, and installs their objects.
func (c *Cluster) startStorage(ctx context.Context) error {
	if err := c.makeGuestImage(ctx); err != nil {
		return err
	}
	var err error
	if c.Driver, err = c.start("crust-csi", nil, filepath.Join(c.ours, "crust-csi"), "--endpoint", "unix://"+c.path("csi.sock"), "--node-id", Node,
		"--pool", c.path("pool"), "--pool-size", "4Gi", "--crustd-endpoint", "unix://"+c.path("kep.sock")); err != nil {
		return err
	}
	if err := c.Driver.await(ctx, listens(c.path("csi.sock"))); err != nil {
		return err
	}
	if c.Daemon, err = c.start("crustd", nil, filepath.Join(c.ours, "crustd"), "--config", c.path("crustd.yaml")); err != nil {
		return err
	}
	if err := c.Daemon.await(ctx, listens(c.path("runtime.sock"))); err != nil {
		return err
	}
	if err := c.Apply(ctx, storageObjects); err != nil {
		return err
	}
	if err := c.applySnapshotTypes(ctx); err != nil {
		return err
	}
	common := []string{"--kubeconfig", c.Kubeconfig()}
	csi := append(common, "--csi-address", c.path("csi.sock"))
	for name, args := range map[string][]string{
		"csi-provisioner":     append(csi, "--extra-create-metadata"),
		"csi-resizer":         csi,
		"csi-snapshotter":     csi,
		"snapshot-controller": common,
	} {
		if _, err := c.start(name, []string{"NODE_NAME=" + Node}, append([]string{c.program(name)}, args...)...); err != nil {
			return err
		}
	}
	return nil
}

// makeGuestImage makes the image that microVMs boot.
func (c *Cluster) makeGuestImage(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.ours, "crust-sandbox"), "image", "--agent", filepath.Join(c.ours, "crust-agent"), "--out", c.path("image"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("crust-sandbox image: %w: %s", err, out)
	}
	return nil
}

// applySnapshotTypes installs the types of the external snapshotter, out of the module that has them.
func (c *Cluster) applySnapshotTypes(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/kubernetes-csi/external-snapshotter/client/v8")
	cmd.Dir = filepath.Join(c.root, "test/cluster/modules/snapshotter")
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("find the snapshotter's types: %w", err)
	}
	crds := filepath.Join(string(out[:max(0, len(out)-1)]), "config", "crd")
	if _, err := os.Stat(crds); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the module of the snapshotter's types has no %s", crds)
	}
	if out, err := c.Kubectl(ctx, "apply", "-k", crds).CombinedOutput(); err != nil {
		return fmt.Errorf("apply %s: %w: %s", crds, err, out)
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
