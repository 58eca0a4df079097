package main

import (
	"context"
	"errors"
	"io"

	"crust.dev/crust/csiplugin"
)

// repair is run for the subcommand repair.
func repair(ctx context.Context, o options, stdout, stderr io.Writer) error {
	log, err := logger(stderr, o.logLevel, o.logFormat)
	if err != nil {
		return err
	}
	if o.config.PoolDir == "" {
		return errors.New("repair: --pool is missing")
	}
	found, err := csiplugin.Repair(ctx, o.config.PoolDir, log)
	if err == nil {
		found.Print(stdout)
	}
	return err
}
