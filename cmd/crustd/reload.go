package main

import (
	"log/slog"
	"slices"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/configfile"
	"crust.dev/crust/runtimehandler"
)

// reloaded are the keys of the file that need no restart.
var reloaded = []string{"log", "policy", "runtimeClasses"}

// reloader reads the file again while the daemon runs. Its calls come one after the other.
type reloader struct {
	options  *options
	started  *configfile.File // what the daemon was started with
	handlers []runtimehandler.Handler

	last   *configfile.File // the one that update and err are about
	update crust.Update
	err    error
}

// read is for crust.File. It is as strict as at the start. What has not changed since the last call is not looked at
// again: making a handler may cost something each time.
func (r *reloader) read() (crust.Update, error) {
	file, err := configfile.Read(r.options.config)
	if err != nil {
		return crust.Update{}, err
	}
	if r.last == nil || !r.last.SameText(file) {
		r.update, r.err = r.evaluate(file)
		r.last = file
	}
	return r.update, r.err
}

func (r *reloader) evaluate(file *configfile.File) (crust.Update, error) {
	changes := configfile.Changes(r.started, file)
	var handlers []runtimehandler.Handler
	if !slices.Contains(changes, "handlers") {
		handlers = r.handlers
	}
	config, err := r.options.build(file, handlers)
	if err != nil {
		return crust.Update{}, err
	}
	level, err := r.options.level(file)
	if err != nil {
		return crust.Update{}, err
	}
	config.Log = slog.New(slog.DiscardHandler)
	if _, err := crust.New(config); err != nil {
		return crust.Update{}, err
	}
	restart := slices.DeleteFunc(changes, func(key string) bool { return slices.Contains(reloaded, key) })
	if file.Log.Format != r.started.Log.Format {
		restart = append(restart, "log.format")
	}
	return crust.Update{
		Settings: crust.Settings{DefaultPolicy: config.DefaultPolicy, RuntimeClasses: config.RuntimeClasses, LogLevel: level},
		Restart:  restart,
	}, nil
}
