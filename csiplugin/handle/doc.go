// Package handle is how objects of a storage pool are named towards the outside: the ids of CSI for volumes, snapshots and
// group snapshots, which Kubernetes calls handles.
//
// A handle is "<pool>-<kind>-<random>": twelve hexadecimal digits of the pool that holds the object, what kind of object
// it is, and 128 random bits. It says nothing else, neither name nor size, and it is never reused. Because the pool comes
// first, a router in front of many pools can send every call to the right one by the handle alone, and a plugin that is
// asked for another pool's object can say so ([ForeignError]) instead of claiming that it does not exist.
//
// The package does no I/O and knows nothing of what a handle stands for.
package handle
