// Package router is crust-csi for sidecars of which there is one for a whole cluster: the resizer, the snapshotter, and the one that
// serves changed blocks to backup programs. Pools are on nodes; the router reads in the id that a call is about which pool that is, and passes the
// call on to the crust-csi of the node that has it. It keeps nothing, so there may be several, and they may be killed.
//
// Where pools are is in the API server: the kubelet has labelled each Node with the pool that crust-csi told it of. The way to
// the node is TLS in which both sides show certificates (package routing).
//
// Backing images that are made on demand belong to no pool. What such an image is, its handle says; deleting it is told to all nodes.
//
// What a node answers comes back unchanged, code, text and details; so do deadlines and cancellation on the way there. A node
// that cannot be found or does not answer is UNAVAILABLE and never NOT_FOUND, which a sidecar would take for the end of a volume.
package router
