package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

const (
	callTimeout = 30 * time.Second       // of one call to the daemon
	retryDelay  = 200 * time.Millisecond // between two attempts to reach it
)

// Sandbox is what a shim tells the daemon about the sandbox that it owns.
type Sandbox struct {
	// ID is unique on the node: letters, digits, '.', '_', '-', at most 64 bytes.
	ID string
	// Runtime is the kind of runtime.
	Runtime string
	// Address is the unix socket on which the shim serves Shim; absolute.
	Address string
	// VMMPID is the process that holds the sandbox's devices open, or 0 if it is the shim.
	VMMPID int
	// Capabilities and FSTypes are what the guest can do.
	Capabilities runtimehandler.Capabilities
	FSTypes      []string
}

// Mount is one entry of an OCI runtime specification's "mounts".
type Mount struct {
	Destination string
	Type        string
	Source      string
	Options     []string
}

// Resolved is a mount that is a deferral.
type Resolved struct {
	// Index is that of the mount in the list that was resolved.
	Index    int
	Deferral runtimehandler.Deferral
	// SubPath is the directory inside the volume that the container is to see; empty for all of it. It must be
	// resolved beneath the volume's root.
	SubPath string
}

// Client is a shim's line to the daemon.
type Client struct {
	endpoint string
	request  *runtimev1.RegisterSandboxRequest
	log      *slog.Logger

	stop context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	session *session      // nil while there is no connection
	changed chan struct{} // closed when session changes
}

// session is one connection on which the sandbox is registered.
type session struct {
	client  *ttrpc.Client
	service runtimev1.TTRPCSandboxesService
	broken  chan struct{}
}

// Connect registers a sandbox with the daemon whose runtime socket is at path. It keeps trying until ctx ends if the
// daemon does not run yet, but not if the daemon refuses. From then on the client registers again whenever the
// connection breaks, until Close. log should say which sandbox it is about.
func Connect(ctx context.Context, path string, sandbox Sandbox, log *slog.Logger) (*Client, error) {
	c := &Client{
		endpoint: path,
		log:      log,
		done:     make(chan struct{}),
		changed:  make(chan struct{}),
		request: &runtimev1.RegisterSandboxRequest{
			SandboxId:    sandbox.ID,
			Runtime:      sandbox.Runtime,
			Address:      sandbox.Address,
			VmmPid:       int64(sandbox.VMMPID),
			Capabilities: runtimehandler.CapabilitiesToProto(sandbox.Capabilities),
			FsTypes:      sandbox.FSTypes,
		},
	}
	first, err := c.register(ctx, func(err error) bool { return errors.Is(err, errdefs.ErrUnavailable) })
	if err != nil {
		return nil, err
	}
	c.set(first)
	keepCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	c.stop = stop
	go c.keep(keepCtx, first)
	return c, nil
}

// Close ends the registration. The daemon takes the sandbox's volumes back when its processes have ended.
func (c *Client) Close() {
	c.stop()
	<-c.done
}

// keep registers again whenever the connection has broken.
func (c *Client) keep(ctx context.Context, s *session) {
	defer close(c.done)
	for {
		select {
		case <-ctx.Done():
			c.set(nil)
			_ = s.client.Close()
			return
		case <-s.broken:
		}
		c.set(nil)
		// A refusal is not final here: the daemon may still take the former registration for alive.
		logged := ""
		next, err := c.register(ctx, func(err error) bool {
			if text := err.Error(); text != logged && !errors.Is(err, errdefs.ErrUnavailable) {
				logged = text
				c.log.WarnContext(ctx, "crustd refuses the sandbox", rpc.LogError, err)
			}
			return true
		})
		if err != nil {
			return // ctx has ended
		}
		c.log.InfoContext(ctx, "registered with crustd again")
		s = next
		c.set(s)
	}
}

// register dials and registers until it succeeds, ctx ends, or again says that an error is final.
func (c *Client) register(ctx context.Context, again func(error) bool) (*session, error) {
	for {
		s, err := c.registerOnce(ctx)
		if err == nil {
			return s, nil
		}
		if ctx.Err() == nil && !again(err) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("crustd at %s does not answer; is it running?: %w", c.endpoint, err)
		case <-time.After(retryDelay):
		}
	}
}

func (c *Client) registerOnce(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	s := &session{broken: make(chan struct{})}
	var err error
	if s.client, err = rpc.DialTTRPC(ctx, c.endpoint, ttrpc.WithOnClose(func() { close(s.broken) })); err != nil {
		return nil, err
	}
	s.service = runtimev1.NewTTRPCSandboxesClient(s.client)
	if _, err := s.service.RegisterSandbox(ctx, c.request); err != nil {
		return nil, errors.Join(fmt.Errorf("register sandbox %s: %w", c.request.GetSandboxId(), rpc.FromWire(err)), s.client.Close())
	}
	return s, nil
}

func (c *Client) set(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *Client) current() (*session, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session, c.changed
}

// call makes one idempotent call, again and again while the daemon is not there, until ctx ends.
func (c *Client) call(ctx context.Context, fn func(context.Context, runtimev1.TTRPCSandboxesService) error) error {
	for {
		s, changed := c.current()
		err := fmt.Errorf("crustd at %s is not there: %w", c.endpoint, errdefs.ErrUnavailable)
		if s != nil {
			callCtx, cancel := context.WithTimeout(ctx, callTimeout)
			err = rpc.FromWire(fn(callCtx, s.service))
			cancel()
			if !errors.Is(err, errdefs.ErrUnavailable) {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return err
		case <-changed:
		case <-time.After(retryDelay):
		}
	}
}

// Resolve returns those of a container's mounts that are deferrals, and claims them for the sandbox. ErrFailedPrecondition,
// with nothing claimed, if one cannot be had; the text says why.
func (c *Client) Resolve(ctx context.Context, mounts []Mount) ([]Resolved, error) {
	req := &runtimev1.ResolveMountsRequest{}
	for _, m := range mounts {
		req.Mounts = append(req.Mounts, &runtimev1.Mount{Destination: m.Destination, Type: m.Type, Source: m.Source, Options: m.Options})
	}
	var resolved []Resolved
	err := c.call(ctx, func(ctx context.Context, service runtimev1.TTRPCSandboxesService) error {
		resp, err := service.ResolveMounts(ctx, req)
		if err != nil {
			return err
		}
		resolved, err = resolvedFromProto(resp, len(mounts))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("resolve mounts: %w", err)
	}
	return resolved, nil
}

func resolvedFromProto(resp *runtimev1.ResolveMountsResponse, mounts int) ([]Resolved, error) {
	var resolved []Resolved
	for _, r := range resp.GetResolved() {
		d, err := runtimehandler.DeferralFromProto(r.GetDeferral())
		if err != nil {
			return nil, err
		}
		if int(r.GetIndex()) >= mounts {
			return nil, fmt.Errorf("answer about mount %d of %d: %w", r.GetIndex(), mounts, errdefs.ErrInvalidArgument)
		}
		resolved = append(resolved, Resolved{Index: int(r.GetIndex()), Deferral: d, SubPath: r.GetSubPath()})
	}
	return resolved, nil
}

// Bound says that a volume is mounted in the sandbox. No container may see the volume before it has succeeded.
func (c *Client) Bound(ctx context.Context, targetPath string, report *runtimev1.MountReport) error {
	err := c.call(ctx, func(ctx context.Context, service runtimev1.TTRPCSandboxesService) error {
		_, err := service.ReportBound(ctx, &runtimev1.ReportBoundRequest{TargetPath: targetPath, Report: report})
		return err
	})
	if err != nil {
		return fmt.Errorf("report %s as bound: %w", targetPath, err)
	}
	return nil
}

// Released says that the sandbox has let go of a volume's device.
func (c *Client) Released(ctx context.Context, targetPath string) error {
	err := c.call(ctx, func(ctx context.Context, service runtimev1.TTRPCSandboxesService) error {
		_, err := service.ReportReleased(ctx, &runtimev1.ReportReleasedRequest{TargetPath: targetPath})
		return err
	})
	if err != nil {
		return fmt.Errorf("report %s as released: %w", targetPath, err)
	}
	return nil
}
