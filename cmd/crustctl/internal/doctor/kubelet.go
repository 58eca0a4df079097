package doctor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

func checkKubelet(_ context.Context, n *Node) []Finding {
	dir := n.KubeletDir
	info, err := n.stat(dir)
	if err != nil || !info.IsDir() {
		return one(Error, fmt.Sprintf("the kubelet's directory %s is not there", dir), "target paths are beneath it; whatever crustd is told would be elsewhere",
			"say where it is with --kubelet-dir (the kubelet's --root-dir); in a pod, mount it")
	}
	var findings []Finding
	if resolved := n.resolved(dir); resolved != dir {
		findings = append(findings, one(Warning, fmt.Sprintf("%s is a symbolic link to %s", dir, resolved),
			"the container runtime names mount sources by the resolved path; crustd knows both, other tools for Kata's records may not",
			"start the kubelet with --root-dir="+resolved+", or leave it if nobody else writes records")...)
	}
	registry := filepath.Join(dir, "plugins_registry")
	if info, err := n.stat(registry); err != nil || !info.IsDir() {
		findings = append(findings, one(Error, registry+" is not there", "drivers register with the kubelet in it", "check that this is the directory of a running kubelet")...)
	}
	findings = append(findings, n.checkPropagation(dir)...)
	return unless(findings, fmt.Sprintf("%s and its plugins_registry are there, and mounts beneath it are shared", dir))
}

// checkPropagation looks whether the mount that a directory is on is shared, in the mount namespace of the node's init.
func (n *Node) checkPropagation(dir string) []Finding {
	const why = "the kubelet mounts a directory over itself that is not shared when it starts, and hides the seals that crustd has renewed before; a pod cannot mount anything there for the node"
	const cure = "mount --make-rshared / on the node, before the kubelet starts"
	raw, err := n.read("/proc/1/mountinfo")
	if err != nil {
		return one(Warning, fmt.Sprintf("whether mounts beneath %s are shared is not known: %v", dir, err), why, "run doctor as root, with the node's /proc")
	}
	parents, err := mountinfo.GetMountsFromReader(bytes.NewReader(raw), mountinfo.ParentsFilter(n.resolved(dir)))
	if err != nil || len(parents) == 0 {
		return one(Warning, fmt.Sprintf("whether mounts beneath %s are shared is not known: no mount that it is on, %v", dir, err), why, "look at /proc/1/mountinfo")
	}
	nearest := parents[0]
	for _, p := range parents {
		if len(p.Mountpoint) >= len(nearest.Mountpoint) { // of those at the same place the last one is on top
			nearest = p
		}
	}
	if !slices.ContainsFunc(strings.Fields(nearest.Optional), func(f string) bool { return strings.HasPrefix(f, "shared:") }) {
		return one(Warning, fmt.Sprintf("%s is on the mount of %s, which is not shared", dir, nearest.Mountpoint), why, cure)
	}
	return nil
}

// resolved is a path of the node without symbolic links.
func (n *Node) resolved(path string) string {
	rel, err := filepath.Rel(n.Root, n.at(path))
	if err != nil {
		return path
	}
	return filepath.Join("/", rel)
}

const (
	// kataSource is the longest mount source in bytes that Kata can have a record for: it is the name of a directory in
	// base64, and names have 255 bytes at most.
	kataSource = 189
	// dynamicName is the length of the names that the external-provisioner gives to PersistentVolumes (pvc-UID).
	dynamicName = len("pvc-") + uidLength
	uidLength   = 36
	// longestName is the length of the longest name that Kubernetes allows.
	longestName = 253
)

// checkPathLength looks how long the name of a PersistentVolume may be.
func checkPathLength(_ context.Context, n *Node) []Finding {
	dir := n.resolved(n.KubeletDir)
	target := filepath.Join(dir, "pods", strings.Repeat("u", uidLength), "volumes", "kubernetes.io~csi", "x", "mount")
	room := kataSource - (len(target) - 1)
	what := fmt.Sprintf("beneath %s the name of a PersistentVolume may have %d bytes if Kata is to find its record", dir, max(room, 0))
	if room >= dynamicName {
		return ok(fmt.Sprintf("%s; names that are made by Kubernetes have %d, the longest that it allows %d", what, dynamicName, longestName))
	}
	severity := Warning
	if n.usesKata() {
		severity = Error
	}
	return one(severity, fmt.Sprintf("%s; names that are made by Kubernetes have %d", what, dynamicName),
		"Kata cannot have a record for a longer path, and crustd refuses to publish such a volume for it", "give the kubelet a shorter --root-dir")
}

// exists says whether a path of the node is there. If that cannot be known, it says so.
func (n *Node) exists(path string) bool {
	_, err := os.Lstat(filepath.Join(n.at(filepath.Dir(path)), filepath.Base(path)))
	return !os.IsNotExist(err)
}
