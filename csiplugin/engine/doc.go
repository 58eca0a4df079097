// Package engine says what keeps the data of volumes, and nothing of how. [Engine] is the contract; the implementations
// are packages beneath this one, and engine/enginetest holds each of them to every promise.
//
// An engine knows objects: a name and that many bytes. It knows nothing of filesystems, of who uses an object, or of what
// was asked for; that is the catalog's business. Its operations are the smallest that are worth a crash: each either
// happens or does not, and each can be repeated.
//
// Snapshots and clones are objects like any other and share the one space of names. An engine that can tell which ranges of
// an object differ from another object's has [Changes], too.
package engine
