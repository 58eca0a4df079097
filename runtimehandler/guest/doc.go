// Package guest is crust-agent: the service crust.guest.v1.Agent, inside a sandbox.
//
// An [Agent] takes volumes from bare devices to mounted, checked, grown and owned filesystems, measures them, and takes
// them down again; it also runs commands for people and tests. It trusts its host and nobody else. Its state is in memory:
// when the agent ends, the guest ends with it (package boot).
//
// Calls for one mount path wait for each other; calls for different ones do not, so that a volume that hangs holds up
// nobody but those who ask for it. The parts beneath this package know nothing of the service: device, filesystem,
// ownership, process, channel.
package guest
