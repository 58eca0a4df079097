// Package process tells processes apart for good: a pid alone may be given to another process as soon as the first has
// died, a pid with its start time and the boot that it belongs to may not.
package process
