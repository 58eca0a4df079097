// Package qemu runs microVMs: a guest that boots package image, is reached through crust-agent, and gets disks plugged in
// and out while it runs.
//
// A [VM] belongs to the process that started it and dies with it. It has no network, and nothing of the host but what is
// handed to it as an open file: its lines to us are socket pairs, and its disks are opened here and passed on, so that
// there is no socket that somebody else could connect to and no path that somebody could exchange. Its console goes to a
// log of bounded size. A guest that hangs, or QEMU itself, makes calls fail when their time is up, and nothing more.
//
// Sub-packages: qmp speaks to QEMU, image makes what is booted.
package qemu
