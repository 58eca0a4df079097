// Package rpc is how the parts of this project talk to each other and to CSI peers: gRPC and ttrpc over unix sockets
// that belong to root.
//
// It owns listening and dialling, the check of peer credentials, deadlines, one log line per call, and the one place
// where error kinds (github.com/containerd/errdefs) become status codes and back. Handlers return plain errors that
// wrap a kind; they never build a status. A status that came from somewhere else never leaks through: a client facade
// turns it into a kind with [FromWire], or hands it on unchanged, on purpose, with [Relay].
//
// It knows nothing of volumes, sandboxes or any service.
package rpc
