// Package shim makes any runtime's shim a CRuSt runtime.
//
// A shim owns one sandbox. It tells the daemon so ([Connect]), and asks which of a container's mounts are deferrals
// ([Client.Resolve]); it attaches and mounts them, says so, and later says that it has let go. A shim whose guest runs
// crust-agent leaves all of that to [Volumes], and serves the daemon's questions with [Volumes.Register]; one with
// another agent in the guest uses Client alone and implements the service Shim of crust.runtime.v1 itself.
//
// Everything here survives restarts of the daemon: the client dials and registers again by itself.
package shim
