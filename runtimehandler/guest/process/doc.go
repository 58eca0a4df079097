// Package process runs commands in the guest for somebody outside who is slow, forgetful, or gone.
//
// A command's output is kept in a bounded buffer; when that is full, its pipe is not read any further, so that the command
// waits. Every command has a process group of its own. Its first process is not collected before the command is closed,
// so that until then no other process can get its number, and a signal never goes to a stranger.
//
// A command may be one of a container's: it then has a root directory and a user of its own, and a control group that
// ends everything that it has started when it ends. Containers of a guest share everything else; the guest is what keeps
// them from others.
package process
