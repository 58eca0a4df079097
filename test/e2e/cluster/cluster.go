package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Node is the name of the only node.
const Node = "localhost"

// startTimeout bounds the start of one component.
const startTimeout = 5 * time.Minute

// Cluster is a running one-node Kubernetes.
type Cluster struct {
	// Dir has everything: configuration, data, logs.
	Dir string
	// Etcd to Kubelet are the components, as they were last started, SnapshotController one that has nothing of a driver. Driver
	// and Daemon, crust-csi and crustd, and the two sidecars are pods of their own in a cluster of [StartDeployed], and nil.
	Etcd, APIServer, ControllerManager, Scheduler, Containerd, Kubelet, SnapshotController, Driver, Daemon, Provisioner, Snapshotter *Process

	bin, ours, root string
	runtimeSocket   string // where shims find crustd
	sandboxes       string // where shims have their sandboxes; crustd talks to sockets in it
	ports           map[string]int
	processes       []*Process // in the order of their start
	owned           []string   // directories elsewhere, removed at the end
}

// newCluster makes the directory of a cluster of the programs in bin, for the repository at root.
func newCluster(root, bin, dir string) (_ *Cluster, err error) {
	c := &Cluster{bin: bin, ours: filepath.Join(filepath.Dir(bin), "ours"), root: root, ports: map[string]int{}}
	if c.Dir, err = os.MkdirTemp(dir, "crust-"); err != nil {
		return nil, err
	}
	c.runtimeSocket, c.sandboxes = c.path("runtime.sock"), c.path("s")
	for _, sub := range []string{"logs", "pki", "etcd", "pool", "cni", "kubelet/plugins/crust"} {
		if err := os.MkdirAll(c.path(sub), 0o750); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"etcd", "etcd-peer", "apiserver", "controller-manager", "scheduler", "kubelet", "snapshot-metadata"} {
		if c.ports[name], err = freePort(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Start starts a cluster of the programs in bin, for the repository at root, in a new directory below dir, which has to be
// on a disk with direct I/O and have a short name. What serves the storage are processes.
func Start(ctx context.Context, root, bin, dir string, progress io.Writer) (*Cluster, error) {
	return start(ctx, root, bin, dir, progress, stage{"configuration", (*Cluster).configure}, stage{"driver, daemon and sidecars", (*Cluster).startStorage})
}

// stage is a part of a start.
type stage struct {
	what string
	do   func(*Cluster, context.Context) error
}

// start starts everything but the storage between the first stage and the others.
func start(ctx context.Context, root, bin, dir string, progress io.Writer, first stage, storage ...stage) (_ *Cluster, err error) {
	c, err := newCluster(root, bin, dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	for _, s := range append([]stage{
		first,
		{"etcd and the API server", (*Cluster).startAPI},
		{"controllers and the scheduler", (*Cluster).startControllers},
		{"containerd", (*Cluster).startContainerd},
		{"kubelet", (*Cluster).startKubelet},
	}, storage...) {
		fmt.Fprintf(progress, "cluster: starting %s\n", s.what)
		stepCtx, cancel := context.WithTimeout(ctx, startTimeout)
		err := s.do(c, stepCtx)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", s.what, err)
		}
	}
	return c, nil
}

func (c *Cluster) path(elem ...string) string {
	return filepath.Join(append([]string{c.Dir}, elem...)...)
}
func (c *Cluster) pki(name string) string     { return c.path("pki", name) }
func (c *Cluster) program(name string) string { return filepath.Join(c.bin, name) }
func (c *Cluster) port(name string) string    { return strconv.Itoa(c.ports[name]) }
func (c *Cluster) server() string             { return "https://localhost:" + c.port("apiserver") }

// Kubeconfig is a file with which an administrator reaches the API server.
func (c *Cluster) Kubeconfig() string { return c.path("admin.conf") }

// Kubectl returns a command of kubectl as administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, c.program("kubectl"), append([]string{"--kubeconfig", c.Kubeconfig()}, args...)...)
}

// Apply gives objects to the API server, as YAML.
func (c *Cluster) Apply(ctx context.Context, objects string) error {
	cmd := c.Kubectl(ctx, "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(objects)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, out)
	}
	return nil
}

// freePort finds a port of loopback. Somebody else may take it before it is used; then the start fails.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

func (c *Cluster) startAPI(ctx context.Context) (err error) {
	client, peer := "http://127.0.0.1:"+c.port("etcd"), "http://127.0.0.1:"+c.port("etcd-peer")
	c.Etcd, err = c.start("etcd", nil, c.program("etcd"), "--data-dir", c.path("etcd"), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer, "--unsafe-no-fsync", "--log-level", "warn")
	if err != nil {
		return err
	}
	if err := c.Etcd.await(ctx, func(ctx context.Context) error { return get(ctx, client+"/health") }); err != nil {
		return err
	}
	c.APIServer, err = c.start("kube-apiserver", nil, c.program("kube-apiserver"), "--etcd-servers", client, "--bind-address", "127.0.0.1", "--secure-port", c.port("apiserver"),
		"--service-cluster-ip-range", "127.96.0.0/16", "--endpoint-reconciler-type", "none", "--authorization-mode", "Node,RBAC", "--allow-privileged",
		"--client-ca-file", c.pki("ca.crt"), "--tls-cert-file", c.pki("apiserver.crt"), "--tls-private-key-file", c.pki("apiserver.key"),
		"--kubelet-client-certificate", c.pki("admin.crt"), "--kubelet-client-key", c.pki("admin.key"), "--kubelet-preferred-address-types", "Hostname",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", c.pki("accounts.pub"), "--service-account-signing-key-file", c.pki("accounts.key"))
	if err != nil {
		return err
	}
	return c.APIServer.await(ctx, func(ctx context.Context) error { return c.Kubectl(ctx, "get", "--raw", "/readyz").Run() })
}

func get(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return nil
}

func (c *Cluster) startControllers(context.Context) (err error) {
	c.ControllerManager, err = c.start("kube-controller-manager", nil, c.program("kube-controller-manager"), "--kubeconfig", c.Kubeconfig(), "--leader-elect=false",
		"--bind-address", "127.0.0.1", "--secure-port", c.port("controller-manager"), "--use-service-account-credentials",
		"--service-account-private-key-file", c.pki("accounts.key"), "--root-ca-file", c.pki("ca.crt"))
	if err != nil {
		return err
	}
	c.Scheduler, err = c.start("kube-scheduler", nil, c.program("kube-scheduler"), "--kubeconfig", c.Kubeconfig(), "--leader-elect=false",
		"--bind-address", "127.0.0.1", "--secure-port", c.port("scheduler"))
	return err
}

func (c *Cluster) startContainerd(ctx context.Context) (err error) {
	path := "PATH=" + c.bin + ":" + c.ours + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	if c.Containerd, err = c.start("containerd", []string{path}, c.program("containerd"), "--config", c.path("containerd.toml")); err != nil {
		return err
	}
	err = c.Containerd.await(ctx, func(ctx context.Context) error { return c.ctr(ctx, "version") })
	if err != nil {
		return err
	}
	archive := c.path("image.tar")
	if err := writeImage(archive); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	return c.ctr(ctx, "--namespace", "k8s.io", "image", "import", archive)
}

func (c *Cluster) ctr(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, c.program("ctr"), append([]string{"--address", c.path("containerd.sock")}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ctr %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (c *Cluster) startKubelet(ctx context.Context) (err error) {
	if c.Kubelet, err = c.start("kubelet", nil, c.program("kubelet"), "--config", c.path("kubelet.yaml"), "--kubeconfig", c.path("kubelet.conf"),
		"--hostname-override", Node, "--root-dir", c.path("kubelet"), "--cert-dir", c.pki("kubelet")); err != nil {
		return err
	}
	return c.Kubelet.await(ctx, func(ctx context.Context) error {
		out, err := c.Kubectl(ctx, "wait", "--for=condition=Ready", "node/"+Node, "--timeout=10s").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// Close ends everything that was started: pods first, as long as somebody is there to end them, because their shims outlive
// containerd, and then the processes, the last one first. The directory is removed unless something went wrong.
func (c *Cluster) Close() error {
	var errs []error
	if c.Kubelet != nil {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		for _, args := range [][]string{
			{"delete", "pods,pvc", "--all", "--all-namespaces", "--timeout=4m"},
			// What served them, if it was the chart's: the pods that were just deleted have been made anew.
			{"delete", "daemonsets,deployments", "--all", "--namespace", namespace, "--cascade=foreground", "--timeout=2m"},
		} {
			if out, err := c.Kubectl(ctx, args...).CombinedOutput(); err != nil {
				errs = append(errs, fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out))
			}
		}
	}
	for _, p := range slices.Backward(c.processes) {
		errs = append(errs, p.Stop())
	}
	errs = append(errs, c.unmountAll())
	errs = append(errs, c.unshare())
	for _, dir := range c.owned {
		errs = append(errs, os.RemoveAll(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w; kept: %s", err, c.Dir)
	}
	return os.RemoveAll(c.Dir)
}

// unshare removes the mount that share has made, if it has. Shims end a moment after they were told to.
func (c *Cluster) unshare() error {
	deadline := time.Now().Add(stopTimeout)
	err := unix.Unmount(c.Dir, unix.UMOUNT_NOFOLLOW)
	for ; errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); err = unix.Unmount(c.Dir, unix.UMOUNT_NOFOLLOW) {
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: it is no mount
		return fmt.Errorf("umount %s: %w", c.Dir, err)
	}
	return nil
}

// unmountAll removes the mounts below the directory that processes have left, the innermost first.
func (c *Cluster) unmountAll() error {
	raw, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	var errs []error
	for _, line := range slices.Backward(strings.Split(string(raw), "\n")) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.HasPrefix(fields[1], c.Dir+"/") {
			if out, err := exec.Command("umount", fields[1]).CombinedOutput(); err != nil {
				errs = append(errs, fmt.Errorf("umount %s: %w: %s", fields[1], err, out))
			}
		}
	}
	return errors.Join(errs...)
}
