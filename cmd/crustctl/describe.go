package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/output"
	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

func describeCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:               "describe NAME",
		Short:             "Show everything that is known of one deferred volume, and what its sandbox says of it now",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: o.completeNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.admin(cmd, func(ctx context.Context, c adminv1.AdminClient) error {
				resp, err := c.GetDeferral(ctx, &adminv1.GetDeferralRequest{Name: args[0]})
				if err != nil {
					return err
				}
				return o.format.Print(cmd.OutOrStdout(), resp, o.describeView(resp))
			})
		},
	}
}

func (o *options) describeView(resp *adminv1.GetDeferralResponse) output.View {
	d := resp.GetDeferral()
	sealed := "yes"
	if !resp.GetSealed() {
		sealed = "no: what a container writes there goes to the node's disk; crustctl gc seals it again"
	}
	fields := []output.Field{
		{Name: "Volume", Value: d.GetVolumeId()},
		{Name: "Driver", Value: d.GetDriver()},
		{Name: "Pod", Value: pod(d)},
		{Name: "Target path", Value: d.GetTargetPath()},
		{Name: "Sealed", Value: sealed},
		{Name: "Phase", Value: d.GetPhase()},
		{Name: "Published", Value: o.age(d.GetCreated().AsTime()) + " ago"},
		{Name: "Device", Value: fmt.Sprintf("%s, %s", d.GetDevice(), output.Bytes(d.GetSizeBytes()))},
		{Name: "Held open by", Value: strings.Join(resp.GetHolders(), ", ")},
		{Name: "Filesystem", Value: filesystem(d)},
		{Name: "Group", Value: d.GetSupplementalGroup()},
		{Name: "Handler", Value: d.GetHandler()},
		{Name: "Sandbox", Value: o.sandbox(d.GetSandbox())},
		{Name: "Breached", Value: d.GetSandbox().GetBreach()},
	}
	if d.GetExpandingBytes() > 0 {
		fields = append(fields, output.Field{Name: "Expanding to", Value: output.Bytes(d.GetExpandingBytes())})
	}
	fields = append(fields, measured(resp.GetStats(), resp.GetStatsError())...)
	views := []output.View{output.Fields(fields...)}
	if len(resp.GetFindings()) > 0 {
		views = append(views, output.Titled("To be put right (crustctl gc does it)", findings(resp.GetFindings())))
	}
	return output.Views(views...)
}

func filesystem(d *adminv1.Deferral) string {
	words := append([]string{d.GetFsType()}, d.GetMountFlags()...)
	if d.GetReadOnly() {
		words = append(words, "read-only")
	}
	return strings.Join(words, " ")
}

func (o *options) sandbox(s *adminv1.Sandbox) string {
	if s == nil {
		return ""
	}
	text := fmt.Sprintf("%s (%s) for %s", s.GetId(), s.GetRuntime(), o.age(s.GetSince().AsTime()))
	if len(s.GetPids()) > 0 {
		text += ", processes " + strings.Trim(fmt.Sprint(s.GetPids()), "[]")
	}
	return text
}

// measured is what a sandbox says of a filesystem.
func measured(s *adminv1.Stats, reason string) []output.Field {
	if s == nil {
		return []output.Field{{Name: "Statistics", Value: reason}}
	}
	health := "good"
	if s.GetAbnormal() {
		health = s.GetMessage()
	}
	b, i := s.GetBytes(), s.GetInodes()
	return []output.Field{
		{Name: "Used", Value: fmt.Sprintf("%s of %s, %s free", output.Bytes(b.GetUsed()), output.Bytes(b.GetTotal()), output.Bytes(b.GetAvailable()))},
		{Name: "Inodes", Value: fmt.Sprintf("%d of %d, %d free", i.GetUsed(), i.GetTotal(), i.GetAvailable())},
		{Name: "Health", Value: health},
	}
}
