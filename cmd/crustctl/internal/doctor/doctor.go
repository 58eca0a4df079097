// Package doctor looks over a node: whether crustd runs and finds what it needs, whether the runtimes honour deferred
// volumes, and what was left behind. It reads and changes nothing, and works without crustd as well.
//
// Each check is a function in the table of its file's subject. What it finds says what is wrong, why that hurts, and what
// cures it.
package doctor

import (
	"cmp"
	"context"

	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

// Severity says how much a finding hurts.
type Severity string

// The severities.
const (
	// OK: in order.
	OK Severity = "ok"
	// Warning: something does not work as well as it could, or will hurt some day.
	Warning Severity = "warning"
	// Error: deferred volumes do not work on this node, or some of them.
	Error Severity = "error"
)

// Finding is what a check has found.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	What     string   `json:"what"`
	// Why says why it hurts, and Cure what helps; empty if it is in order.
	Why  string `json:"why,omitempty"`
	Cure string `json:"cure,omitempty"`
}

// Report is everything that was found.
type Report struct {
	Findings []Finding `json:"findings"`
	Errors   int       `json:"errors"`
	Warnings int       `json:"warnings"`
}

// Node is what is looked at.
type Node struct {
	// Root is where the node's filesystem is: "/" on the node, say "/host" in a pod.
	Root string
	// KubeletDir is the kubelet's root directory, /var/lib/kubelet if empty.
	KubeletDir string
	// ConfigFile is crustd's configuration file, for what crustd cannot tell while it is down; it need not exist.
	ConfigFile string
	// AdminSocket is where crustd was asked.
	AdminSocket string
	// Version is that of this command.
	Version string

	// Status and Deferrals are what crustd says; nil, and DaemonErr why, if it does not answer.
	Status    *adminv1.GetStatusResponse
	Deferrals []*adminv1.Deferral
	DaemonErr error

	// Filesystem measures the filesystem that has a path, which is below Root already; [Statfs] if nil.
	Filesystem func(path string) (Filesystem, error)
}

// check is one thing to look at. It may find several.
type check struct {
	name string
	run  func(context.Context, *Node) []Finding
}

// checks are all of them, in the order in which they are reported.
var checks = []check{
	{"privileges", checkPrivileges},
	{"kernel", checkKernel},
	{"kvm", checkKVM},
	{"configuration", checkConfigFile},
	{"crustd", checkDaemon},
	{"sockets", checkSockets},
	{"state", checkState},
	{"kubelet", checkKubelet},
	{"path-length", checkPathLength},
	{"runtimes", checkRuntimes},
	{"records", checkRecords},
	{"sandboxes", checkSandboxes},
}

// Examine runs all checks.
func Examine(ctx context.Context, n Node) Report {
	n.Root = cmp.Or(n.Root, "/")
	n.KubeletDir = cmp.Or(n.KubeletDir, "/var/lib/kubelet")
	if n.Filesystem == nil {
		n.Filesystem = Statfs
	}
	r := Report{Findings: []Finding{}}
	for _, c := range checks {
		for _, f := range c.run(ctx, &n) {
			f.Check = c.name
			switch f.Severity {
			case Error:
				r.Errors++
			case Warning:
				r.Warnings++
			}
			r.Findings = append(r.Findings, f)
		}
	}
	return r
}

func ok(what string) []Finding { return []Finding{{Severity: OK, What: what}} }

func one(severity Severity, what, why, cure string) []Finding {
	return []Finding{{Severity: severity, What: what, Why: why, Cure: cure}}
}

// unless is findings, or else that all is in order.
func unless(findings []Finding, what string) []Finding {
	if len(findings) == 0 {
		return ok(what)
	}
	return findings
}
