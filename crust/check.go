package crust

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/kube"
)

// Check looks whether Run would find what it needs, as far as that can be seen without changing anything and without
// calling anybody. It returns everything that is wrong.
func (d *Daemon) Check() error {
	errs := []error{directory("state directory", d.config.StateDir)}
	paths := []string{d.sockets.runtime, d.sockets.kep, d.sockets.admin}
	for i, s := range d.sockets.drivers {
		paths = append(paths, s.endpoint, s.upstream)
		if d.config.Drivers[i].Register {
			if _, err := os.Stat(d.config.RegistrationDir); err != nil {
				errs = append(errs, fmt.Errorf("registration directory: %w; it is plugins_registry in the kubelet's root directory", err))
			}
		}
	}
	for _, path := range paths {
		if path != "" {
			errs = append(errs, socket(path))
		}
	}
	if k := d.config.Kubernetes; k != nil {
		_, err := kube.Connect(kube.Config{Kubeconfig: k.Kubeconfig, Node: k.Node})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// socket says what is in the way of a socket.
func socket(path string) error {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().Type() != os.ModeSocket {
		return fmt.Errorf("socket %s: there is something else; remove it or choose another path: %w", path, errdefs.ErrAlreadyExists)
	}
	return directory("directory of socket "+path, filepath.Dir(path))
}

// directory says what is in the way of a directory that is there or will be made.
func directory(what, path string) error {
	for {
		info, err := os.Stat(path)
		switch {
		case err == nil && info.IsDir():
			return nil
		case err == nil:
			return fmt.Errorf("%s: %s is not a directory: %w", what, path, errdefs.ErrFailedPrecondition)
		case !errors.Is(err, os.ErrNotExist) || path == "/":
			return fmt.Errorf("%s: %w", what, err)
		}
		path = filepath.Dir(path)
	}
}
