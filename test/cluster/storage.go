package cluster

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
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
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: crust-xfs}
provisioner: ` + Driver + `
allowVolumeExpansion: true
volumeBindingMode: WaitForFirstConsumer
parameters: {csi.storage.k8s.io/fstype: xfs}
`

// snapshotObjects are those whose types have to be installed before.
const snapshotObjects = `apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: crust}
driver: ` + Driver + `
deletionPolicy: Delete
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotClass
metadata: {name: crust-image}
driver: ` + Driver + `
deletionPolicy: Delete
parameters: {type: bi, export-type: qcow2}
---
apiVersion: groupsnapshot.storage.k8s.io/v1
kind: VolumeGroupSnapshotClass
metadata: {name: crust}
driver: ` + Driver + `
deletionPolicy: Delete
`

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
	if c.Daemon, err = c.start("crustd", nil, filepath.Join(c.ours, "crustd"), "--config", c.path("crustd.yaml")); err != nil {
		return err
	}
	if err := c.Daemon.await(ctx, listens(c.path("runtime.sock"))); err != nil {
		return err
	}
	if err := c.Apply(ctx, storageObjects); err != nil {
		return err
	}
	if err := c.applyTypes(ctx, "snapshotter", "github.com/kubernetes-csi/external-snapshotter/client/v8", "groupsnapshot.storage.k8s.io", "snapshot.storage.k8s.io"); err != nil {
		return err
	}
	if err := c.applyTypes(ctx, "snapshotmetadata", "github.com/kubernetes-csi/external-snapshot-metadata/client", "cbt.storage.k8s.io"); err != nil {
		return err
	}
	if err := c.Apply(ctx, snapshotObjects); err != nil {
		return err
	}
	common := []string{"--kubeconfig", c.Kubeconfig()}
	csi := slices.Concat(common, []string{"--csi-address", c.path("csi.sock")})
	for name, args := range map[string][]string{
		"csi-provisioner":     slices.Concat(csi, []string{"--extra-create-metadata", "--node-deployment", "--enable-capacity", "--capacity-ownerref-level=-1", "--immediate-topology=false"}),
		"csi-resizer":         csi,
		"csi-snapshotter":     slices.Concat(csi, []string{"--node-deployment", "--extra-create-metadata", "--feature-gates=CSIVolumeGroupSnapshot=true"}),
		"snapshot-controller": slices.Concat(common, []string{"--enable-distributed-snapshotting", "--feature-gates=CSIVolumeGroupSnapshot=true"}),
		"csi-snapshot-metadata": slices.Concat(csi, []string{
			"--port", c.port("snapshot-metadata"), "--tls-cert", c.pki("apiserver.crt"), "--tls-key", c.pki("apiserver.key"),
		}),
	} {
		if _, err := c.start(name, []string{"NODE_NAME=" + Node, "NAMESPACE=default"}, append([]string{c.program(name)}, args...)...); err != nil {
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

// applyTypes installs the custom resource definitions of some API groups, out of the module that has them, and waits until
// they are served. The version of the module is that of a program's.
func (c *Cluster) applyTypes(ctx context.Context, program, module string, groups ...string) error {
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	cmd.Dir = filepath.Join(c.root, "test/cluster/modules", program)
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
