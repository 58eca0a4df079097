package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/sandbox"
)

// askTimeout bounds the question to one sandbox.
const askTimeout = 5 * time.Second

// listed is one sandbox in the list.
type listed struct {
	sandbox.Info
	Volumes []string `json:"volumes"` // target paths of mounted volumes
	Error   string   `json:"error,omitempty"`
}

func listCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the sandboxes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			infos, err := sandbox.List(o.root)
			if err != nil {
				return err
			}
			list := []listed{}
			for _, info := range infos {
				list = append(list, ask(cmd.Context(), o.root, info))
			}
			if o.output == "json" {
				return json.NewEncoder(os.Stdout).Encode(list)
			}
			return printList(list)
		},
	}
}

// ask has a living sandbox tell what it has mounted.
func ask(ctx context.Context, root string, info sandbox.Info) listed {
	l := listed{Info: info, Volumes: []string{}}
	if !info.Alive {
		return l
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	client, err := sandbox.Connect(ctx, root, info.ID)
	if err != nil {
		l.Error = err.Error()
		return l
	}
	defer client.Close()
	resp, err := runtimev1.NewTTRPCShimClient(client).GetSandbox(ctx, &runtimev1.GetSandboxRequest{})
	if err != nil {
		l.Error = rpc.FromWire(err).Error()
		return l
	}
	for _, v := range resp.GetVolumes() {
		if v.GetMounted() {
			l.Volumes = append(l.Volumes, v.GetTargetPath())
		}
	}
	return l
}

func printList(list []listed) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSTATE\tPID\tACCEL\tAGE\tVOLUMES")
	for _, l := range list {
		state := "starting"
		switch {
		case !l.Alive:
			state = "dead"
		case l.Error != "":
			state = "silent"
		case l.Ready:
			state = "ready"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%d\n", l.ID, state, l.PID, l.Accel, time.Since(l.Started).Round(time.Second), len(l.Volumes))
		for _, v := range l.Volumes {
			fmt.Fprintf(w, "\t\t\t\t\t%s\n", filepath.Clean(v))
		}
	}
	return w.Flush()
}
