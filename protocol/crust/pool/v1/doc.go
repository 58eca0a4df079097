// Package poolv1 is generated from pool.proto, which documents it.
package poolv1
