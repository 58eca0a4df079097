// Package e2e has the tests of the whole: the programs of this tree as processes, on real loop devices, filesystems and
// microVMs. What one part alone promises is tested beside it.
package e2e
