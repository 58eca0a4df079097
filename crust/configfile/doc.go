// Package configfile reads crustd's configuration file: YAML, version crust.dev/v1, described in docs/configuration.md.
//
// It is strict. A key that it does not know, a key that is there twice, a key without a value, a value of the wrong kind:
// each is an error that names the file, the line and what to write instead. Anchors, aliases and several documents in one
// file are refused. Nothing has a default here; what the file does not say is left zero.
//
// It opens nothing but the file and knows no runtime: the settings of a handler are read by whoever knows its kind, with
// [Handler.Settings].
package configfile
