// Package kata is the handler for Kata Containers, for its Go runtime and for runtime-rs.
package kata
