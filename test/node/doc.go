// Package node runs CRuSt's programs as they run on a node, all in one directory, and plays the kubelet and the sidecars
// of a CSI driver towards them. The demo and the end-to-end tests are made of it: New, StartServices, Volume, StartSandbox,
// and at last Close. It owns the processes and the directory; it never looks into the programs.
package node
