// Package reflink is the engine that keeps every object in one sparse file on a filesystem that can share blocks between
// files: XFS made with reflink=1, or btrfs.
//
// "Never written" is the file having no data extent: lseek(2) with SEEK_DATA finds nothing. Preallocated space does not
// count, data that is still in the page cache does. "In use" is the kernel's word too: a write lease (fcntl(2), F_SETLEASE)
// is granted only on a file that nobody else has open, in whatever namespace, loop devices included; while it is held,
// open(2) of the file waits. Who the user is has to be searched for in /proc and is only for the message.
//
// A file is made under a temporary name, synced, renamed, and its directory synced. [Open] removes the temporary names
// that a process has left which died in between. Files that it does not know it leaves alone.
package reflink
