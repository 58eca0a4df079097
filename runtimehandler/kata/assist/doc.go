// Package assist does on the host, before a volume is handed over, what a sandbox's agent cannot do: make, check and grow a
// filesystem, and give its files to a group. It does so in a child process with a private mount namespace and a time
// limit, so that a filesystem that a guest has written can hang or crash that process and nothing else, and its mounts go
// with it.
//
// It uses the tools and rules of our own guest (runtimehandler/guest/filesystem): in particular, a filesystem is made only
// where it is known that nothing was ever written.
//
// [Run] is for the parent. The child is the program itself: its main function calls [Main] before anything else. What the
// child may do is decided by the parent; nobody but the parent should start it.
//
// [Look] reads a few numbers out of a superblock, as data, with no help of the kernel's filesystems.
package assist
