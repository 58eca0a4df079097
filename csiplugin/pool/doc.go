// Package pool opens the directory that a plugin keeps everything in.
//
// On XFS with reflink, or btrfs, the directory is used as it is. Anywhere else the pool makes itself an XFS filesystem in
// one sparse file, pool.img, attaches it to a loop device and mounts it at mnt within the directory; that is for trying
// things out, because the file system around it can fill up underneath it, and it says so. The mount outlives the process
// when somebody still has files open in it, and is found again by the next one.
//
//	lock       held while a process has the pool open, with its pid in it
//	pool.json  format and identity of the pool, written last when a pool is made   (*)
//	catalog.db package catalog                                                     (*)
//	objects/   the engine's                                                        (*)
//	pool.img   the image, if there is one
//	mnt/       where it is mounted; then (*) are in here
//
// A pool is made in an order in which every interruption is finished by opening it again. A pool that has lost its catalog
// is refused: a new one would take every volume for garbage.
package pool
