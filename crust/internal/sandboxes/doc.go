// Package sandboxes serves the shims' API (service Sandboxes of crust.runtime.v1): a facade of package deferrals that
// knows which connection speaks for which sandbox, and that notices when a shim has vanished.
package sandboxes
