package main

import (
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"

	"crust.dev/crust/cmd/internal/command"
	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/sandbox"
)

func execCommand(o *options) *cobra.Command {
	var c sandbox.Command
	var interactive bool
	cmd := &cobra.Command{
		Use:   "exec ID -- COMMAND [ARG...]",
		Short: "Run a command in a guest; its exit code is ours",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := sandbox.Connect(cmd.Context(), o.root, args[0])
			if err != nil {
				return err
			}
			defer client.Close()
			c.Argv, c.Stdout, c.Stderr = args[1:], os.Stdout, os.Stderr
			if interactive {
				c.Stdin = io.Reader(os.Stdin)
			}
			exit, err := sandbox.Exec(cmd.Context(), guestv1.NewTTRPCAgentClient(client), c)
			switch {
			case context.Cause(cmd.Context()) != nil:
				return &command.ExitError{Code: 130}
			case err != nil:
				return err
			case exit != 0:
				return &command.ExitError{Code: exit}
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.Flags().StringArrayVarP(&c.Env, "env", "e", nil, "NAME=value for the command; may be repeated")
	cmd.Flags().StringVarP(&c.Dir, "workdir", "w", "", "working directory in the guest")
	return cmd
}
