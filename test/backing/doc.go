// Package backing tests backing images as a cluster uses them: the manifests of docs/backing-images.md become the calls that
// Kubernetes' sidecars make of them, against the commands, and what comes of it is mounted in a microVM.
package backing
