// Package reflink is the engine that keeps every object in one sparse file on a filesystem that can share blocks between
// files: XFS made with reflink=1, or btrfs.
//
// "Never written" is the file having no data extent: lseek(2) with SEEK_DATA finds nothing. Preallocated space does not
// count, data that is still in the page cache does. "In use" is the kernel's word too: a write lease (fcntl(2), F_SETLEASE)
// is granted only on a file that nobody else has open, in whatever namespace, loop devices included; while it is held,
// open(2) of the file waits. Who the user is has to be searched for in /proc and is only for the message.
//
// Cloning takes a time in proportion to the number of extents, so they are kept few: on XFS new files have an extent size
// hint of 64 KiB. Written in random order, block by block, a file then lies in a sixteenth of the extents that it would lie
// in without; the price is that a lone block of 4 KiB takes 64. After a snapshot XFS's own default for copied blocks, 128
// KiB, does the same for overwriting. btrfs has no such hints.
//
// A file is made under a temporary name, synced, renamed, and its directory synced. [Open] removes the temporary names
// that a process has left which died in between. Files that it does not know it leaves alone. An object's label is the extended attribute user.crust.label of its file.
//
// A sealed object is an immutable file (chattr +i), from which the mark is taken for a moment to change its label, and for
// good to delete it. What holds data and what has changed is read from extent maps by engine/extents.
package reflink
