// Package deferrals is the life of a deferral: published by a storage provider, claimed by a sandbox, mounted inside,
// measured and grown there, released, unpublished.
//
// It is the one implementation behind three facades: CSI (package proxy), the shims' API (package sandboxes) and the
// Runtime service of KEP-2857 (package runtimeapi). It owns the rules of docs/architecture.md: one writer per volume, no
// formatting of what may hold data, nothing given back while a sandbox may still write to it, and durable intent before
// every act. [Manager.Reconcile] finishes or undoes what a dead daemon has left, and renews what a reboot has taken.
//
// It knows neither wire types nor kinds of runtimes.
package deferrals
