package kata

import "path/filepath"

// paths are where Kata keeps what concerns us. Rootless runtime-rs looks elsewhere, in a directory that cannot be known
// beforehand; package config finds that in its configuration.
type paths struct {
	// records is the directory of direct volumes, of both runtimes.
	records string
	// scratch is where records are prepared and taken apart: on the filesystem of records and outside of it, since every
	// name in there is taken for a record by somebody.
	scratch string
	// goSandboxes and rustSandboxes have a directory for each sandbox, with its management socket.
	goSandboxes, rustSandboxes string
	// shared has, for each sandbox of runtime-rs, the directory that it shares with its guest.
	shared string
	// bundles are patterns for the OCI configuration of each container: of containerd, also as K3s
	// runs it, and of CRI-O.
	bundles []string
}

func pathsBelow(root string) paths {
	at := func(path string) string { return filepath.Join(root, path) }
	return paths{
		records:       at("/run/kata-containers/shared/direct-volumes"),
		scratch:       at("/run/kata-containers/shared/crust-scratch"),
		goSandboxes:   at("/run/vc/sbs"),
		rustSandboxes: at("/run/kata"),
		shared:        at("/run/kata-containers/shared/sandboxes"),
		bundles: []string{
			at("/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json"),
			at("/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json"),
			at("/run/containers/storage/*-containers/*/userdata/config.json"),
		},
	}
}

// socketName is the management socket in a sandbox's directory, of both runtimes.
const socketName = "shim-monitor.sock"
