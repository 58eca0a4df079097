// Package cli is the handler for runtimes that follow KEP-2857 to the letter: a record per deferral in a directory, which
// the runtime finds by the source of a mount, and a command of the runtime's for statistics and growth.
//
// The record is <root>/<SHA-256 of the target path, hexadecimal>/mountInfo.json. Once the runtime has mounted the volume
// it puts a file runtime-cli beside it with the path of its command; when it has unmounted, it removes that. The command
// is called as
//
//	COMMAND crust stats TARGET
//	COMMAND crust resize TARGET MIN MAX
//
// without a shell, for a limited time, and answers in JSON with the fields of RuntimeGetVolumeStatsResponse and
// RuntimeExpandVolumeResponse.
//
// Records appear and change in one step, and outlive neither a reboot nor their deferral. What others have put into the
// directory is left alone and reported.
package cli
