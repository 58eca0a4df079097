// Package runtimehandler says what a container runtime has to do for a volume whose filesystem it mounts inside a
// sandbox, and nothing of how.
//
// [Handler] is the one contract: the daemon (package crust) speaks to every kind of runtime through it, and
// runtimehandler/handlertest holds every implementation to its promises. The implementations are packages beneath this
// one; so are the parts of our own microVM runtime (qemu, guest, sandbox) and the library for authors of other shims
// (shim).
package runtimehandler
