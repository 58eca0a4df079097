package main

import (
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"crust.dev/crust/crust"
	"crust.dev/crust/crust/configfile"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/cli"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/remote"
	"crust.dev/crust/runtimehandler/sandbox"
)

// kinds are the kinds of handlers that a configuration file may have. Each reads its own settings; the file's name and
// line are in the errors of configfile.
var kinds = map[string]func(h configfile.Handler, config crust.Config) (runtimehandler.Handler, error){
	remote.Name: newRemote,
	cli.Name:    newCLI,
	kata.Name:   newKata,
}

// handlers are those of the file, or else the one for shims that register.
func handlers(file *configfile.File, config crust.Config) ([]runtimehandler.Handler, error) {
	if len(file.Handlers) == 0 {
		return []runtimehandler.Handler{remote.Handler{}}, nil
	}
	var list []runtimehandler.Handler
	var errs []error
	for _, h := range file.Handlers {
		build, ok := kinds[h.Kind]
		if !ok {
			errs = append(errs, h.Errorf("kind", "kind: %q: want one of %s", h.Kind, strings.Join(slices.Sorted(maps.Keys(kinds)), ", ")))
			continue
		}
		handler, err := build(h, config)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, handler)
	}
	return list, errors.Join(errs...)
}

func newRemote(h configfile.Handler, _ crust.Config) (runtimehandler.Handler, error) {
	if h.Name != "" && h.Name != remote.Name {
		return nil, h.Errorf("name", "name: a handler of kind %s is always called %s; take the key out", remote.Name, remote.Name)
	}
	return remote.Handler{}, h.Settings(&struct{}{})
}

// cliSettings are the settings of a handler of kind cli.
type cliSettings struct {
	Root         string        `yaml:"root"`
	Timeout      time.Duration `yaml:"timeout"`
	Capabilities []string      `yaml:"capabilities"`
}

func newCLI(h configfile.Handler, config crust.Config) (runtimehandler.Handler, error) {
	var s cliSettings
	if err := h.Settings(&s); err != nil {
		return nil, err
	}
	capabilities, err := parseCapabilities(h, s.Capabilities)
	if err != nil {
		return nil, err
	}
	if s.Root == "" {
		s.Root = cli.DefaultRoot
	}
	handler, err := cli.New(cli.Config{Name: h.Name, Root: s.Root, Timeout: s.Timeout, Capabilities: capabilities, Ignore: ours(s.Root, config)})
	if err != nil {
		return nil, h.Errorf("", "%v", err)
	}
	return handler, nil
}

// parseCapabilities reads the names of what a runtime can do.
func parseCapabilities(h configfile.Handler, names []string) (runtimehandler.Capabilities, error) {
	var c runtimehandler.Capabilities
	var errs []error
	for _, name := range names {
		switch name {
		case "format":
			c.Format = true
		case "check":
			c.Check = true
		case "grow":
			c.Grow = true
		case "online-expand":
			c.OnlineExpand = true
		case "group":
			c.Group = true
		case "subpath":
			c.SubPath = true
		default:
			errs = append(errs, h.Errorf("capabilities", "capabilities: %q: want format, check, grow, online-expand, group or subpath", name))
		}
	}
	return c, errors.Join(errs...)
}

// ours are the names in a directory that are not records: sockets of the daemon, and the directory of our own sandboxes.
func ours(root string, config crust.Config) []string {
	var names []string
	paths := []string{sandbox.DefaultRoot, filepath.Join(filepath.Dir(sandbox.DefaultRoot), "accel.json")}
	for _, d := range config.Drivers {
		paths = append(paths, socketPath(d.Endpoint), socketPath(d.Upstream))
	}
	for _, endpoint := range []string{config.RuntimeEndpoint, config.KEPEndpoint, config.AdminEndpoint} {
		paths = append(paths, socketPath(endpoint))
	}
	for _, path := range paths {
		if filepath.Dir(path) == root {
			names = append(names, filepath.Base(path))
		}
	}
	return names
}
