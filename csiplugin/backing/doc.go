// Package backing is about golden images for virtual machines that are managed with nothing but standard CSI snapshots, as
// Longhorn does it: a snapshot whose handle begins with "bi://" stands for an image that was exported from a volume, or that
// is downloaded when the first volume is made from it.
//
// This package has the handles ([Handle]) and touches nothing. What is done with them is in the packages beneath it:
//
//   - qcow2 looks at images before anything else does,
//   - download fetches them,
//   - convert turns one format into another, in a child that can do nothing else,
//   - images keeps them in a storage pool.
//
// An image is untrusted whoever has made it: the rules by which it is handled are in docs/backing-images.md.
package backing
