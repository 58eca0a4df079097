// Package boot is process 1 of a guest whose only purpose is crust-agent.
//
// [Run] mounts what every Linux program expects, loads kernel modules, starts the agent as a child, and from then on does
// nothing but collect orphans. It is a process of its own because both it and the agent wait for children: in one process,
// collecting orphans would steal the exit codes of the agent's commands. When the agent ends, however it ends, the guest
// has no purpose any more: what can be written to disk is written, and the machine is powered off.
package boot
