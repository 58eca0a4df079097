// Package snapshot tests what snapshots of volumes are worth whose filesystems are mounted in running microVMs, with the
// commands as they are shipped.
package snapshot
