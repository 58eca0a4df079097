package config

import (
	"fmt"
	"maps"
	"slices"
)

// Severity says how much a finding hurts.
type Severity string

// The severities.
const (
	// Broken: deferred volumes do not reach the sandboxes of this configuration.
	Broken Severity = "broken"
	// Limited: they do, and something else does not work.
	Limited Severity = "limited"
)

// Finding is something in a configuration file that hurts deferred volumes.
type Finding struct {
	Path       string // the file
	Hypervisor string // the table; empty if it concerns the whole file
	Severity   Severity
	Text       string // what is wrong
	Cure       string // what helps
}

// String is the finding in one line.
func (f Finding) String() string {
	where := f.Path
	if f.Hypervisor != "" {
		where += " [hypervisor." + f.Hypervisor + "]"
	}
	return where + ": " + f.Text + "; " + f.Cure
}

// Findings returns what in a file hurts deferred volumes, in the order of the tables' names.
func (f File) Findings() []Finding {
	if f.Err != nil {
		return []Finding{{Path: f.Path, Severity: Broken, Text: fmt.Sprintf("cannot be read: %v", f.Err), Cure: "Kata starts no sandbox with it: mend or remove it"}}
	}
	var list []Finding
	for _, name := range slices.Sorted(maps.Keys(f.Hypervisors)) {
		h := f.Hypervisors[name]
		add := func(severity Severity, text, cure string) {
			list = append(list, Finding{Path: f.Path, Hypervisor: name, Severity: severity, Text: text, Cure: cure})
		}
		// The Go runtime overrides the setting for Firecracker, which has no other kind of disk; runtime-rs does not look at
		// it for direct volumes.
		if f.Runtime == Go && h.DisableBlockDeviceUse && name != "firecracker" {
			add(Broken, "disable_block_device_use=true: the Go runtime ignores direct volumes without a word, and shows the pod an empty directory of the node in which it cannot write",
				"set disable_block_device_use=false in a file of config.d beside it, or use runtime-rs")
		}
		if f.Runtime == Rust && h.Rootless {
			add(Broken, "rootless=true: runtime-rs looks for records in a directory of a user that it makes for each sandbox", "set rootless=false")
		}
		if h.ConfidentialGuest {
			add(Limited, "confidential_guest=true: the usual policies of confidential guests deny statistics and metrics", "allow GetMetricsRequest and VolumeStatsRequest in the policy, or do without")
		}
	}
	return list
}
