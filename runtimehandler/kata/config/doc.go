// Package config reads the configuration files of Kata Containers, those of the Go runtime and those of runtime-rs, with
// the drop-ins beside them, as far as they decide whether a volume reaches a sandbox. It changes nothing.
//
// [Read] finds the files below a root directory, so that a pod that sees its node's filesystem under /host reads the
// node's files and not its own image's. [File.Findings] says in words what in a file hurts a deferred volume, before a pod
// is hurt.
package config
