// Package crust is crustd, the node daemon: towards the CO (the kubelet) it is a CSI driver, towards the real driver it
// is the CO. Volumes whose filesystem a sandbox is to mount it records, hands to the sandbox's runtime, and answers for
// from inside the sandbox; everything else goes through untouched.
//
// The daemon knows runtimes only through runtimehandler.Handler, and storage only through CSI. Its parts are in
// crust/internal; [New] puts them together and [Daemon.Run] is their whole life. docs/architecture.md has the picture.
package crust
