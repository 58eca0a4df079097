// Package runtimev1 is generated from runtime.proto, which documents it.
package runtimev1
