package crust

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/kube"
	"crust.dev/crust/crust/internal/metrics"
	"crust.dev/crust/crust/internal/policy"
	"crust.dev/crust/crust/internal/runtimeapi"
	"crust.dev/crust/crust/internal/sp"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// stopTimeout is how long calls in flight may take after the daemon was told to stop.
const stopTimeout = 20 * time.Second

// Daemon is one crustd.
type Daemon struct {
	config  Config
	sockets *sockets
}

// New checks a configuration. It does no I/O.
func New(c Config) (*Daemon, error) {
	s, err := c.validate()
	if err != nil {
		return nil, err
	}
	return &Daemon{config: c, sockets: s}, nil
}

// parts are what the daemon is made of.
type parts struct {
	providers []*sp.Provider
	manager   *deferrals.Manager
	policy    *policy.Policy
	pods      *kube.Client // nil without Kubernetes
	metrics   *metrics.Metrics
}

// Run opens the journal, listens, finishes what an earlier daemon has left, and serves until ctx ends; then it lets
// calls in flight finish.
func (d *Daemon) Run(ctx context.Context) (err error) {
	if err := os.MkdirAll(d.config.StateDir, 0o700); err != nil {
		return fmt.Errorf("state directory: %w", err)
	}
	j, err := journal.Open(filepath.Join(d.config.StateDir, "journal.db"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	p := &parts{}
	closeAll, err := d.dial(p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	if err := d.assemble(p, j); err != nil {
		return err
	}
	ctx = rpc.WithObserver(ctx, p.metrics.Call)
	run, err := d.listen(ctx, p)
	if err != nil {
		return err
	}
	if p.pods != nil {
		run = append(run, p.pods.Run)
	}
	run = append(run, func(ctx context.Context) error { return d.reconcile(ctx, p) })
	d.config.Log.InfoContext(ctx, "crustd is ready", "drivers", len(p.providers), "runtime", d.sockets.runtime)
	group, ctx := errgroup.WithContext(ctx)
	for _, part := range run {
		group.Go(func() error { return part(ctx) })
	}
	return group.Wait()
}

// dial makes the connections to the drivers; each is opened when it is first used.
func (d *Daemon) dial(p *parts) (closeAll func() error, err error) {
	var conns []*grpc.ClientConn
	closeAll = func() error {
		var errs []error
		for _, conn := range conns {
			errs = append(errs, conn.Close())
		}
		return errors.Join(errs...)
	}
	for _, s := range d.sockets.drivers {
		conn, err := rpc.Dial(s.upstream)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("driver endpoint: %w", err), closeAll())
		}
		conns = append(conns, conn)
		p.providers = append(p.providers, sp.New(conn))
	}
	return closeAll, nil
}

// assemble puts the parts together that do no I/O yet.
func (d *Daemon) assemble(p *parts, j *journal.Journal) (err error) {
	c := policy.Config{Default: d.config.DefaultPolicy, DefaultHandler: d.config.DefaultHandler, RuntimeClasses: d.config.RuntimeClasses}
	if k := d.config.Kubernetes; k != nil {
		if p.pods, err = kube.Connect(kube.Config{Kubeconfig: k.Kubeconfig, Node: k.Node}); err != nil {
			return err
		}
		c.Pods = p.pods
	}
	if p.policy, err = policy.New(c); err != nil {
		return err
	}
	p.manager, err = deferrals.New(deferrals.Config{
		Journal:     j,
		Handlers:    d.config.Handlers,
		DeviceRoots: d.config.DeviceRoots,
		StorageOf:   storageOf(p.providers),
		Published:   func() { p.metrics.Published() },
		Notify:      p.notify,
	})
	if err != nil {
		return err
	}
	p.metrics = metrics.New(p.manager.List)
	return nil
}

// notify writes an event to a pod, if there is an API server and the pod is known.
func (p *parts) notify(n deferrals.Notice) {
	if p.pods != nil && n.Pod.Name != "" {
		p.pods.Event(policy.PodID{UID: n.Pod.UID, Namespace: n.Pod.Namespace, Name: n.Pod.Name}, n.Warning, n.Reason, n.Message)
	}
}

// storageOf finds the driver of a volume by its name.
func storageOf(providers []*sp.Provider) func(context.Context, runtimehandler.Deferral) (deferrals.Storage, error) {
	return func(ctx context.Context, v runtimehandler.Deferral) (deferrals.Storage, error) {
		if v.Driver == runtimeapi.Driver {
			return runtimeapi.Storage(v), nil
		}
		var errs []error
		for _, p := range providers {
			name, err := p.Name(ctx)
			if err == nil && name == v.Driver {
				return p.PublishedVolume(v.Driver, v.VolumeID, v.TargetPath), nil
			}
			if err != nil {
				errs = append(errs, err)
			}
		}
		return nil, fmt.Errorf("driver %s is not configured, or does not answer: %w: %w", v.Driver, errors.Join(errs...), errdefs.ErrUnavailable)
	}
}
