// Package catalog is what a pool knows of its volumes, snapshots and group snapshots: which exist, what was asked for, what this node does with them, and
// what was about to be done when a process died. It is one bbolt file beside the data, so that a pool can be moved with
// its disk.
//
// The catalog stores and finds; it decides nothing and touches nothing else. Whoever changes the world writes the intent
// first, acts, and then writes the outcome ([Volume.State], [Volume.Expanding], [Publish.State], [Node.Formatting]). Each
// write is one transaction and durable when it returns.
//
// A catalog that is damaged, that a newer version has written, or that belongs to another pool is refused and left as it
// is. Every record carries a checksum of its own, because bbolt has none for data. Space for the transactions that give
// things back is reserved ahead ([Catalog.Reserve]), so that volumes can be deleted and unpublished when the disk is full.
//
// Volumes, snapshots and group snapshots are tables of their own, keyed by their handles, each with its own space of names.
// A volume that was made from another or from a snapshot names that in [Volume.Source], which may be gone since: nothing in
// here depends on anything else. A group snapshot and its members are written together.
// A snapshot that was deleted and is kept to be compared with is in a table of its own, the bases; it moves there in one step.
//
// Nothing confidential is in it: of mount flags, which CSI allows to be confidential, there is only a digest.
package catalog
