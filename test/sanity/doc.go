// Package sanity holds the driver to csi-sanity, the test suite of Kubernetes' CSI community: the commands as they are
// shipped, asked directly and through the node daemon, for mounts and for block devices.
package sanity
