// Package images keeps backing images in a storage pool: what was exported from volumes, and what is downloaded when somebody
// wants a volume made from it. The data of an image is a raw object of the engine, so that making a volume from it is one
// clone, whatever its size. An export to qcow2 has that file beside it.
//
// # States
//
// An image's record in the catalog is Creating while nobody can rely on it: a download, or an export that was not cut yet. If
// that is found at a start it is undone, and whoever wants the image asks again. Exporting is an export that was cut, whose
// qcow2 file is not finished: the cut is kept, the file is begun again. Ready is durable and whole. Deleting is carried on.
//
// Files that are in the making are in a directory of their own ([Config.Dir]), on the pool's filesystem. At a start all are
// removed that no image has.
//
// # Preparing
//
// Preparing goes on in a job when the call that asked for it has ended. Calls that come meanwhile are told how far it is
// (ErrAborted). What a job fails of is told to one call, and the next call begins anew; the caller's back-off is the pause
// between attempts.
//
// Data comes into the pool in one way only: it is written to a file, looked at, and then cloned into an object, so that what
// was looked at is what volumes are made from. An object that is finished is sealed (engine.Changes), and nobody can write to it
// any more.
package images
