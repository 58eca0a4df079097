// Package uninstall finds out whether a CSI driver may be taken away from a cluster: which pods use volumes of it. It reads
// pods and PersistentVolumes and changes nothing.
//
// A pod that is there is proof enough: the kubelet removes a pod from the API server only after its volumes were given back.
// (Not so if somebody deletes it with --force; the node then still has the volume, and crustctl list there shows it.)
package uninstall
