// Package backingtest makes disk images for tests, byte by byte: good ones, and those with which hosts have been attacked.
// Nothing but tests imports it.
package backingtest
