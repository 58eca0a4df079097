// Package cbt holds crust-csi's changed block tracking against the bytes, with what others have written: real filesystems in
// a microVM make the changes, and the verifier of Kubernetes' external-snapshot-metadata, which knows nothing of us, applies
// our answers to restored volumes and compares every byte.
package cbt
