// Package backup is a backup client, small enough to be read in one go: it asks a CSI driver which ranges of a snapshot hold
// data, or have changed since another one, copies those into an image file, and compares the whole of it.
//
// It knows nothing of the driver but CSI's SnapshotMetadata service, and nothing of where a snapshot's data can be read: the
// caller names a device or a file that has it, which is usually a volume made from the snapshot.
package backup
