// Package deferred is this project's extension of CSI 1.13: how a CO tells an SP to leave a filesystem to a sandbox, and
// how the SP answers with what has to be mounted. See docs/architecture.md for the reasons and deferred.proto for the
// fields.
//
// The upstream Go types are used unchanged. [Set] appends an extension to an upstream message as fields that this
// message does not know, and [Get] reads it back; a peer that knows nothing of the extension carries or ignores them. The
// extension's capabilities are shown to those only who [Ask] for them.
package deferred
