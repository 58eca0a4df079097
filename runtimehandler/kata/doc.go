// Package kata is the handler for Kata Containers, for its Go runtime and for runtime-rs.
//
// Kata has no API for volumes that a daemon could call. It has a directory of records, one per mount source, which both
// runtimes look into when they create a container; it has a management socket per sandbox; and it leaves traces of what it
// has done in /run. This package writes the records, finds the sandboxes, holds the traces against the records, and asks
// the sockets. docs/kata.md says for users what works on which runtime.
//
// Three rules shape it. A record is seen whole or not at all, whoever is killed: runtime-rs refuses a container whose
// record is half there, and the Go runtime mounts the node's directory instead. A sandbox counts as having a volume only
// when the runtime's own traces prove it; if they do not in time, the deferral is breached, and Status says so. And what
// Kata's agent cannot do (make, check, grow a filesystem, on runtime-rs also fsGroup) is done on the host before the record
// is put out, in a process of its own (package assist), if the configuration allows that step, and refused otherwise.
//
// It never removes what others have put into Kata's directories, never writes createFilesystem (Kata's agent formats
// without looking), and never touches a device that a sandbox may have.
package kata
