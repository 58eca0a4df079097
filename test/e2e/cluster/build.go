package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// program is what is built from one module file.
type program struct {
	module   string
	packages []string
	rename   string // of the only program, if its package has another name
	ldflags  string

	dir, key string // where the module file is, and what changes with it; see Build
}

// upstream are the programs by the module file that pins their version. The version of Kubernetes is told to the linker,
// because its components compare theirs.
var upstream = []program{
	{module: "containerd", packages: []string{
		"github.com/containerd/containerd/v2/cmd/containerd", "github.com/containerd/containerd/v2/cmd/ctr",
		"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
	}},
	{module: "etcd", rename: "etcd", packages: []string{"go.etcd.io/etcd/server/v3"}},
	{module: "kubernetes", ldflags: "-X k8s.io/component-base/version.gitVersion=v1.36.3 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36", packages: []string{
		"k8s.io/kubernetes/cmd/kube-apiserver", "k8s.io/kubernetes/cmd/kube-controller-manager", "k8s.io/kubernetes/cmd/kube-scheduler",
		"k8s.io/kubernetes/cmd/kubelet", "k8s.io/kubernetes/cmd/kubectl",
	}},
	{module: "sidecars", packages: []string{
		"github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner", "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer",
		"github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter", "github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller",
		"github.com/kubernetes-csi/external-snapshot-metadata/cmd/csi-snapshot-metadata", "helm.sh/helm/v3/cmd/helm",
	}},
}

// CacheDir is where programs are kept between runs.
func CacheDir() (string, error) {
	base := os.Getenv("XDG_CACHE_HOME")
	if base == "" {
		base = "/var/cache"
	}
	if !filepath.IsAbs(base) {
		return "", fmt.Errorf("XDG_CACHE_HOME %q is not an absolute path", base)
	}
	return filepath.Join(base, "crust", "cluster"), nil
}

// Build makes the programs of the cluster, from the repository at root, unless they are in the cache: those of the named
// modules, or of all if none is named, and this project's own. It returns the directory that has them, and says on progress
// what it is at. Another process that builds at the same time is waited for.
func Build(ctx context.Context, root string, progress io.Writer, modules ...string) (bin string, err error) {
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	bin = filepath.Join(cache, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := exclusively(ctx, lock, progress); err != nil {
		return "", err
	}
	var stale []program
	for _, u := range upstream {
		u.dir = filepath.Join(root, "test/e2e/cluster/modules", u.module)
		if u.key, err = sourceKey(u.dir, u.ldflags); err != nil {
			return "", err
		}
		if had, err := os.ReadFile(filepath.Join(cache, u.module+".key")); err != nil || string(had) != u.key {
			stale = append(stale, u)
		}
	}
	// What takes the network and what takes the processors is done side by side, and the network goes ahead.
	fetchCtx, cancel := context.WithCancel(ctx)
	var fetch sync.WaitGroup
	defer fetch.Wait()
	defer cancel()
	fetch.Go(func() {
		for _, u := range stale {
			_ = goTool(fetchCtx, root, append([]string{"list", "-C", u.dir, "-deps"}, u.packages...)...) // if it fails, the build says why
		}
	})
	for _, u := range stale {
		if len(modules) > 0 && !slices.Contains(modules, u.module) {
			continue
		}
		start := time.Now()
		fmt.Fprintf(progress, "cluster: building %s (minutes, once)\n", u.module)
		out := bin + "/"
		if u.rename != "" {
			out = filepath.Join(bin, u.rename)
		}
		// Not with -trimpath, by which a package depends on what its module had been before it was replaced.
		args := append([]string{"build", "-C", u.dir, "-ldflags", strings.TrimSpace("-s -w " + u.ldflags), "-o", out}, u.packages...)
		if err := goTool(ctx, root, args...); err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(cache, u.module+".key"), []byte(u.key), 0o644); err != nil {
			return "", err
		}
		fmt.Fprintf(progress, "cluster: built %s in %v\n", u.module, time.Since(start).Round(time.Second))
	}
	ours := filepath.Join(cache, "ours") + "/"
	return bin, errors.Join(os.MkdirAll(ours, 0o755), goTool(ctx, root, "build", "-trimpath", "-o", ours, "./cmd/..."))
}

// exclusively locks a file until it is closed, when nobody else has it locked.
func exclusively(ctx context.Context, f *os.File, progress io.Writer) error {
	for told := false; ; told = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if !told {
			fmt.Fprintf(progress, "cluster: waiting for another build, which has %s locked\n", f.Name())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("another build has %s locked: %w", f.Name(), ctx.Err())
		case <-time.After(time.Second):
		}
	}
}

// sourceKey changes when something has to be built again.
func sourceKey(dir, flags string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.Version(), runtime.GOARCH, flags)
	for _, name := range []string{"go.mod", "go.sum"} {
		raw, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		h.Write(raw)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// goTool runs go without cgo, which nothing needs that is built here, so that all programs share what is compiled. The
// compiler spends a fifth of its time on collecting garbage unless it is told that there is memory.
func goTool(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if os.Getenv("GOGC") == "" {
		cmd.Env = append(cmd.Env, "GOGC=400")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
