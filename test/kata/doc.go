// Package kata is a stand-in for Kata Containers in tests: its directories below a root, its two runtimes with their
// habits, their management sockets, and a container runtime that speaks CRI and writes OCI bundles.
//
// It does what the sources of Kata 4.1 do with a container's mounts, also where that is a trap: the Go runtime takes a
// record that it cannot read for none, runtime-rs closes connections instead of answering, and so on. What a sandbox
// mounts is mounted by a [Guest], which is a few numbers in memory, or a real virtual machine.
package kata
