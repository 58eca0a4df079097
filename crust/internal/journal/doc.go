// Package journal keeps what crustd must not forget: one record per published volume, in one bbolt file.
//
// Whoever changes the world writes the intent first, acts, and then writes the outcome; package deferrals does so, and
// finishes or undoes what a dead daemon has left. The journal itself knows nothing of CSI, sandboxes or devices. It
// holds all records in memory as well, so that reading is free and a rule over several records (one writer per volume)
// is checked in the same step that reserves the new one. Writers that come together share one commit.
package journal
