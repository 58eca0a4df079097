package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"crust.dev/crust/runtimehandler/kata/config"
)

// kataRecords is where both of Kata's runtimes look for records.
const kataRecords = "/run/kata-containers/shared/direct-volumes"

// usesKata says whether crustd has a handler that writes records for Kata, by what it says or by its file.
func (n *Node) usesKata() bool {
	for _, h := range n.Status.GetHandlers() {
		if slices.Contains(h.GetRoots(), kataRecords) {
			return true
		}
	}
	if n.Status == nil {
		for _, h := range n.file().Handlers {
			if h.Kind == "kata" {
				return true
			}
		}
	}
	return false
}

// checkRuntimes looks which runtimes are there, and whether their configuration lets deferred volumes in.
func checkRuntimes(_ context.Context, n *Node) []Finding {
	files, err := config.Read(n.Root)
	if err != nil {
		return one(Warning, fmt.Sprintf("the configuration of Kata: %v", err), "whether Kata honours deferred volumes is not known", "make it readable for root")
	}
	var findings []Finding
	for _, f := range files {
		found := f.Findings()
		for _, k := range found {
			findings = append(findings, n.ofKata(k)...)
		}
		if len(found) == 0 {
			findings = append(findings, ok(fmt.Sprintf("Kata's %s: %s, which lets deferred volumes in", runtimeName(f.Runtime), describe(f)))...)
		}
	}
	for _, h := range n.Status.GetHandlers() {
		classes := "no RuntimeClass"
		if len(h.GetRuntimeClasses()) > 0 {
			classes = "handlers of RuntimeClasses " + strings.Join(h.GetRuntimeClasses(), ", ")
		}
		findings = append(findings, ok(fmt.Sprintf("crustd's handler %s, for %s", h.GetName(), classes))...)
	}
	if len(files) == 0 && n.usesKata() {
		findings = append(findings, one(Warning, "crustd has a handler for Kata, but no configuration of Kata was found", "whether Kata honours deferred volumes is not known",
			"install Kata, or say with --root where the node's filesystem is")...)
	}
	return unless(findings, "no configuration of Kata was found; shims of other runtimes register when a sandbox starts")
}

// ofKata is a finding of Kata's. What breaks volumes is an error only if crustd hands any to Kata.
func (n *Node) ofKata(k config.Finding) []Finding {
	severity := Warning
	why := "crustd has no handler for Kata yet; with one, this would lose volumes"
	if n.usesKata() {
		why = "pods of RuntimeClasses with this configuration do not get their deferred volumes; crustd notices and reports them as breached"
		if k.Severity == config.Broken {
			severity = Error
		}
	}
	if k.Severity == config.Limited {
		why = "volumes work; what is named does not"
	}
	where := k.Path
	if k.Hypervisor != "" {
		where += " [hypervisor." + k.Hypervisor + "]"
	}
	return one(severity, where+": "+k.Text, why, k.Cure)
}

func runtimeName(r config.Runtime) string {
	if r == config.Go {
		return "Go runtime"
	}
	return "runtime-rs"
}

func describe(f config.File) string {
	text := fmt.Sprintf("%s (%s)", f.Path, strings.Join(slices.Sorted(maps.Keys(f.Hypervisors)), ", "))
	if len(f.DropIns) > 0 {
		text += " with " + strings.Join(f.DropIns, ", ")
	}
	return text
}
