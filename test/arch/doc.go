// Package arch holds the tree to its rules: who may import whom, which packages may exist, how long a file may be.
package arch
