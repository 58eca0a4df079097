// Package qmp speaks the QEMU Machine Protocol (QEMU's docs/interop/qmp-spec.txt) over one connection.
//
// Answers are matched to commands by id, so that one slow command does not hold up others and an answer that comes too
// late goes to nobody. Every command needs a deadline. When the connection breaks, every pending command fails. The other
// end is not trusted with our memory: a message has a maximal length.
package qmp
