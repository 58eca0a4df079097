// Package extents reads where a file lies on its filesystem, and tells from that alone which ranges of two files may differ.
// No data is read: the cost is that of the extent maps, whatever the size of the files.
//
// # When the answer is right
//
// [Compare] never misses a change if both files are on one filesystem that never overwrites a block that two files share
// (XFS made with reflink=1, btrfs), neither has been written since it was cloned, and the clones' data is on disk. Then two
// files that map an offset to the same block have the same byte there. The reverse is not true: what was rewritten with the
// same bytes lies elsewhere, and is reported.
//
//   - The map of both files is looked at: a hole punched in the younger one has no extent there, only in the older.
//   - A hole and a preallocated range ("unwritten") both read as zero, and are the same.
//   - Whether a block is shared, and where the kernel cuts an extent in two, means nothing.
//   - An extent with a flag that says that its place is not known, not all of it, or not what it seems (delayed, encoded,
//     encrypted, inline, packed, or a flag of the future) has changed, always.
//
// # Files that move while they are read
//
// Two maps are read one after the other. If the filesystem moved blocks in between (xfs_fsr, btrfs balance or defragment),
// a block of the one could have been given to the other. On XFS an immutable file (chattr +i) cannot be moved: every way of
// doing so wants it open for writing. In all other cases a part of the older map is read again after the same part of the
// younger; if it is not the same, the part is read anew, and at last reported whole.
//
// What is left is that the older file leaves a block, the younger gets it and leaves it, and the older gets it back, all
// within the time of two system calls. btrfs gives a freed block to nobody before its transaction has been committed, so
// that would take three commits in that time.
//
// The comparison rests on include/uapi/linux/fiemap.h and Documentation/filesystems/fiemap.rst.
package extents
