package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
	"crust.dev/crust/protocol/rpc"
)

// defaultEndpoint is where crustd serves this command unless it is told otherwise.
const defaultEndpoint = "unix:///run/crust/admin.sock"

// options are the flags of all subcommands.
type options struct {
	endpoint string
	timeout  time.Duration
	format   output.Format
	now      func() time.Time // time.Now if nil
}

func (o *options) flags(root *cobra.Command) {
	flags := root.PersistentFlags()
	flags.StringVar(&o.endpoint, "admin-endpoint", defaultEndpoint, "crustd's socket for this command")
	flags.DurationVar(&o.timeout, "timeout", 2*time.Minute, "how long to wait for crustd")
	o.format.Flag(root)
}

// age is how long ago something was.
func (o *options) age(t time.Time) string {
	now := time.Now
	if o.now != nil {
		now = o.now
	}
	return output.Age(now().Sub(t))
}

// admin calls crustd, and keeps whoever waits at a terminal informed. The errors of fn are those of the calls that it has
// made.
func (o *options) admin(cmd *cobra.Command, fn func(context.Context, adminv1.AdminClient) error) error {
	return explain(o.endpoint, o.call(cmd.Context(), func() func() { return patience(cmd) }, fn))
}

// call is admin without advice. began is called when a call begins, and what it returns when that has ended.
func (o *options) call(ctx context.Context, began func() (ended func()), fn func(context.Context, adminv1.AdminClient) error) (err error) {
	path, err := rpc.ParseEndpoint(o.endpoint)
	if err != nil {
		return fmt.Errorf("--admin-endpoint: %w", err)
	}
	around := func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		defer began()()
		return fromWire(ctx, method, req, reply, conn, invoke, opts...)
	}
	conn, err := rpc.Dial(path, grpc.WithChainUnaryInterceptor(around))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	return fn(ctx, adminv1.NewAdminClient(conn))
}

// fromWire turns the errors of calls into ours.
func fromWire(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return rpc.FromWire(invoke(ctx, method, req, reply, conn, opts...))
}

// explain adds what to do about an error that is not about the call itself.
func explain(endpoint string, err error) error {
	switch {
	case errors.Is(err, errdefs.ErrUnavailable):
		return fmt.Errorf("crustd on %s: %w; is it running? crustctl doctor finds out what is wrong", endpoint, err)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("crustd on %s has not answered in time: %w; give it more with --timeout, or look at its log", endpoint, err)
	case errors.Is(err, errdefs.ErrNotImplemented):
		return fmt.Errorf("crustd on %s is older than this command: %w; use the crustctl of its release", endpoint, err)
	}
	return err
}

// completeNames offers the names of deferrals to a shell.
func (o *options) completeNames(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second)
	defer cancel()
	var names []string
	offer := func(name, description string) {
		if output.Printable(name) == name { // else it cannot be typed
			names = append(names, name+"\t"+output.Printable(description))
		}
	}
	err := o.call(ctx, func() func() { return func() {} }, func(ctx context.Context, c adminv1.AdminClient) error {
		resp, err := c.ListDeferrals(ctx, &adminv1.ListDeferralsRequest{})
		for _, d := range resp.GetDeferrals() {
			offer(d.GetVolumeId(), pod(d))
			offer(d.GetTargetPath(), d.GetVolumeId())
			if d.GetPod().GetName() != "" {
				offer(pod(d), d.GetVolumeId())
			}
		}
		return err
	})
	if err != nil {
		cobra.CompErrorln(err.Error())
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// pod is the name of the pod of a deferral, as far as it is known.
func pod(d *adminv1.Deferral) string { return podName(d.GetPod()) }

func podName(p *adminv1.Pod) string {
	if p.GetName() != "" {
		return p.GetNamespace() + "/" + p.GetName()
	}
	return p.GetUid()
}
