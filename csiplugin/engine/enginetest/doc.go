// Package enginetest is the conformance suite of engine.Engine: every implementation passes it, on every kind of storage
// that it claims to support.
package enginetest
