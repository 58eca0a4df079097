package sandboxes

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/process"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// connection answers the calls of one connection, hence of one sandbox.
type connection struct {
	server *Server
	peer   rpc.Peer

	claimant deferrals.Claimant // set by RegisterSandbox; guarded by server.mu
}

// speaker returns the sandbox that the connection speaks for.
func (c *connection) speaker() (deferrals.Claimant, error) {
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	if c.claimant.Sandbox.ID == "" {
		return deferrals.Claimant{}, fmt.Errorf("register a sandbox on this connection first: %w", errdefs.ErrFailedPrecondition)
	}
	return c.claimant, nil
}

// RegisterSandbox is that of the API.
func (c *connection) RegisterSandbox(ctx context.Context, req *runtimev1.RegisterSandboxRequest) (*runtimev1.RegisterSandboxResponse, error) {
	claimant, err := c.parseRegistration(req)
	if err != nil {
		return nil, err
	}
	if err := reach(ctx, claimant.Sandbox.Address); err != nil {
		return nil, err
	}
	if err := c.server.admit(c, claimant); err != nil {
		return nil, err
	}
	return &runtimev1.RegisterSandboxResponse{}, nil
}

// reachTime is how long a shim may take to take a connection when it registers.
const reachTime = 5 * time.Second

// reach finds out whether crustd can call a shim. Otherwise the first to notice would be whoever expands a volume that is mounted
// already.
func reach(ctx context.Context, address string) error {
	dialCtx, cancel := context.WithTimeout(ctx, reachTime)
	defer cancel()
	client, err := rpc.DialTTRPC(dialCtx, address)
	if ctx.Err() != nil { // nobody waits any more, or crustd is about to end: that says nothing of the shim
		return fmt.Errorf("reach the shim: %v: %w", context.Cause(ctx), errdefs.ErrUnavailable)
	}
	if err != nil {
		return fmt.Errorf("crustd cannot reach the shim: %v; it has to be served before it is registered, in a directory that crustd sees, too (in a pod of the chart: beneath /run/crust): %w",
			err, errdefs.ErrFailedPrecondition)
	}
	return client.Close()
}

func (c *connection) parseRegistration(req *runtimev1.RegisterSandboxRequest) (deferrals.Claimant, error) {
	claimant := deferrals.Claimant{
		Sandbox:      runtimehandler.Sandbox{ID: req.GetSandboxId(), Runtime: req.GetRuntime(), Address: req.GetAddress()},
		Handler:      c.server.config.Handler,
		Capabilities: runtimehandler.CapabilitiesFromProto(req.GetCapabilities()),
		FSTypes:      req.GetFsTypes(),
	}
	if err := validRegistration(req); err != nil {
		return claimant, err
	}
	shim, err := process.Of(c.peer.PID)
	if err != nil {
		return claimant, fmt.Errorf("shim: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	claimant.Processes = []process.Identity{shim}
	if req.GetVmmPid() != 0 {
		vmm, err := process.Of(int(req.GetVmmPid()))
		if err != nil {
			return claimant, fmt.Errorf("vmm_pid: %w: %w", err, errdefs.ErrFailedPrecondition)
		}
		claimant.Processes = append(claimant.Processes, vmm)
	}
	return claimant, nil
}

// ResolveMounts is that of the API.
func (c *connection) ResolveMounts(ctx context.Context, req *runtimev1.ResolveMountsRequest) (*runtimev1.ResolveMountsResponse, error) {
	claimant, err := c.speaker()
	if err != nil {
		return nil, err
	}
	if len(req.GetMounts()) > maxMounts {
		return nil, fmt.Errorf("%d mounts, %d are allowed: %w", len(req.GetMounts()), maxMounts, errdefs.ErrInvalidArgument)
	}
	sources := make([]string, len(req.GetMounts()))
	for i, m := range req.GetMounts() {
		sources[i] = m.GetSource()
	}
	claims, err := c.server.config.Deferrals.Claim(ctx, claimant, sources)
	if err != nil {
		return nil, err
	}
	resp := &runtimev1.ResolveMountsResponse{}
	for _, claim := range claims {
		resp.Resolved = append(resp.Resolved, &runtimev1.ResolvedMount{
			Index:    uint32(claim.Index),
			Deferral: runtimehandler.DeferralToProto(claim.Deferral),
			SubPath:  claim.SubPath,
		})
	}
	return resp, nil
}

// ReportBound is that of the API.
func (c *connection) ReportBound(ctx context.Context, req *runtimev1.ReportBoundRequest) (*runtimev1.ReportBoundResponse, error) {
	claimant, err := c.speaker()
	if err != nil {
		return nil, err
	}
	if err := c.server.config.Deferrals.Bound(ctx, claimant.Sandbox.ID, req.GetTargetPath()); err != nil {
		return nil, err
	}
	report := req.GetReport()
	rpc.Logger(ctx).InfoContext(ctx, "volume is mounted in a sandbox",
		rpc.LogSandbox, claimant.Sandbox.ID, rpc.LogTarget, req.GetTargetPath(), rpc.LogDuration, report.GetDuration().AsDuration(),
		"formatted", report.GetFormatted(), "repaired", report.GetRepaired(), "grown", report.GetGrown())
	return &runtimev1.ReportBoundResponse{}, nil
}

// ReportReleased is that of the API.
func (c *connection) ReportReleased(ctx context.Context, req *runtimev1.ReportReleasedRequest) (*runtimev1.ReportReleasedResponse, error) {
	claimant, err := c.speaker()
	if err != nil {
		return nil, err
	}
	if err := c.server.config.Deferrals.Released(ctx, claimant.Sandbox.ID, req.GetTargetPath()); err != nil {
		return nil, err
	}
	return &runtimev1.ReportReleasedResponse{}, nil
}
