package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
	return unless(findings, fmt.Sprintf("%s and its plugins_registry are there", dir))
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
