// Containerd-shim-crust-v2 runs the containers of a pod in a microVM that mounts deferred volumes inside. containerd starts
// it; docs/containerd-shim.md says how it is set up.
package main

import (
	"context"

	"crust.dev/crust/runtimehandler/containerdshim"
)

func main() { containerdshim.Main(context.Background()) }
