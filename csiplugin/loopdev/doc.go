// Package loopdev attaches files to loop devices and finds the devices that a file is attached to.
//
// The kernel is the only record: a device belongs to a file if the kernel says that its backing file has that device and
// inode number, never because somebody noted its name. Two kinds of attachment are made. A passing one ([Attach] without
// Lasting) is autoclear: the kernel detaches it when its last user has gone, so that nothing is left behind by a process
// that dies between attaching and mounting, and an unmount is all the clean-up there is. A lasting one stays until
// [Detach]; it is for device nodes that are handed out without being opened.
//
// Devices use direct I/O where the file's filesystem can, so that data is not cached twice, and never scan for
// partitions: what a volume holds is not the host's business.
package loopdev
