// Package filesystem makes, checks, mounts, measures and grows ext4 and XFS filesystems inside a guest.
//
// It never guesses: [Read] finds out what is on a device, [Decide] says from that and from what the caller knows what may
// be done, as a pure function, and the rest does it. The rule behind Decide is that a filesystem is made only where it is
// known that there is no data; docs/adr/0001-blankness.md has the reasons.
//
// It keeps no state and takes no locks: one caller at a time for a device.
package filesystem
