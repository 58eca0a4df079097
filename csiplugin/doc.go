// Package csiplugin is a CSI 1.13 plugin for volumes on one node's disks. It speaks protocol/csi/deferred: asked to, it
// publishes a volume by saying which file a sandbox has to attach, and mounts nothing; everybody else gets an ordinary
// mount, or a block device, on the host.
//
// # Where things are
//
// [Plugin] opens a pool (package pool) and serves the CSI services on a unix socket. What exists and what this node does
// with it is in the pool's catalog (package catalog); data is in an engine (package engine, with engine/reflink); what is
// mounted is known to the kernel only (packages hostmount and loopdev) and asked there each time. The RPCs are one file per
// family. Each reads as phases: parse the request, take the volume's lock, finish what an earlier process left undone,
// plan, apply.
//
// On a cluster there is a plugin per node. Calls of sidecars of which there is only one come through package router, to a port
// where nothing else is served (routed.go).
//
// # Rules
//
// Volumes are thin: creating one takes no space, and a pool can be promised more than once over; GetCapacity reports what
// is free now. A volume is on one node and in one pool, and the topology segment "<driver name>/pool" says in which.
//
// Staging mounts nothing: at that time it is not known whether the volume will be deferred. The first publish on the host
// mounts the volume at its staging path, the last unpublish unmounts it, and in between it can only be published on the
// host. A volume that is published deferred is published nowhere else, unless all its publishes are read-only and deferred.
//
// A filesystem is made only on a volume that was never written, which the engine knows and blkid does not. While it is
// being made the catalog says so; if that is found later, the volume has never been in use, is erased and made again.
//
// A record that another boot of the machine made (by the kernel's boot id) is not a use: its mounts are gone and its
// sandboxes too. It stands in nobody's way, and is set up again when the same is to be published.
//
// A snapshot, a clone and a restored volume are objects of their own that share blocks with what they were made from, and
// need it no more. Cutting is the engine's Clone; around it, what the host's caches have is written back, and, where the CO
// wants it or several volumes are cut at once, crustd freezes the filesystems in their sandboxes (consistency.go). What
// consistency was asked for and cannot be had is refused.
//
// A snapshot of type "bi" is a backing image: a golden disk with a handle "bi://" that is Longhorn's, which volumes are cloned
// from as from any snapshot (images*.go here, and package backing). It is exported from a volume, or downloaded when somebody
// wants the first volume made from it. Preparing one goes on in a job of its own, and calls that wait for it are ABORTED with how
// far it is. What an image holds was made by somebody who is not trusted: it is looked at, and converted in a child without
// rights, before it becomes an object of the pool; then it is sealed, like a snapshot. What is asked for with a handle is never
// put into volume_context, because handles have URLs.
//
// At most one call works on a volume at a time; another one is ABORTED. Calls that only read a volume, as cutting does,
// share it. Cutting can take minutes, so it goes on when its caller has given up (jobs.go), and whoever asks again is told
// so. What has to survive a kill is written before it is done and completed, or undone, by the next call for that volume or
// the next start (settle.go). Each object carries its record as a label, from which [Repair] makes a lost catalog anew.
package csiplugin
