// Package sandbox is our own runtime: one QEMU microVM per process, which owns it as a shim would. It registers with the
// daemon, mounts deferrals inside the guest, answers the daemon's questions, runs commands in the guest for tests and
// people, and gives everything back when it ends.
//
// It puts packages qemu (the machine) and shim (the daemon's side) together. A sandbox has a directory,
// <root>/<id>, with its control socket and its console; the directory is locked while its process lives.
package sandbox
