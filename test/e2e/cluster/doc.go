// Package cluster is a one-node Kubernetes that runs on loopback from directories of its own: etcd, API server, controller
// manager, scheduler, kubelet and containerd of upstream's source, unchanged, with this project's driver, daemon and microVM
// runtime, and the CSI sidecars. [Build] makes the programs, once; [Start] starts everything, and [Cluster.Close] stops it.
// [StartDeployed] installs the chart instead of starting driver, daemon and sidecars itself.
//
// The versions are in the module files beneath modules, which are none of this project's dependencies. The node is called
// "localhost", because that is a name that leads to the kubelet. There is no network for pods but the host's.
package cluster
