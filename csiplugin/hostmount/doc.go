// Package hostmount mounts volumes on the host: for pods that do not run in a sandbox of their own.
//
// It formats, checks, mounts, binds, measures, grows and hands over to a group, and it answers what is mounted where. It
// decides none of that: whether a device may be formatted is for the caller to know, and [Filesystem.Mount] never does it,
// whatever the device looks like. What is mounted at a path is always asked of the kernel, by the path's own mount, never
// by comparing path strings; and a mount is only ever taken for a volume's if it is of the volume's device.
//
// Formatting, checking and growing are those of k8s.io/mount-utils, so that a volume is treated as every other CSI driver
// would treat it. Binds are made with open_tree(2), mount_setattr(2) and move_mount(2): a read-only bind appears at its
// target read-only, or not at all. Linux 5.12 is needed for that.
package hostmount
