// Package qcow2 looks at images before anything else does, in Go and with bounds: what [Inspect] accepts refers to nothing
// but itself, is whole, and holds no more than it says. [Container] finds out whether a file that is declared to be raw
// would be taken for something else by a program that guesses.
//
// The rules are stricter than the format: whatever a golden image has no need of is refused, because each of it has been,
// or could be, the way to a file of the host (CVE-2024-32498, CVE-2024-4467 and their kin). The format is QEMU's
// docs/interop/qcow2.rst. The package changes nothing and knows nothing of where images come from.
package qcow2
