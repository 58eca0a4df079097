package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/test/docs"
	"crust.dev/crust/test/sanity"
)

// TestDeployed plays scenarios on what users install: the chart, by helm, whose pods run the images of this project.
func TestDeployed(t *testing.T) {
	startKube(t, StartDeployed).play(t, []scenario{
		{"first-pod", firstPod}, {"expansion", expansion}, {"taking-turns", takingTurns}, {"snapshots", snapshots},
		{"group", group}, {"backing-images", backingImages}, {"changed-blocks", changedBlocks},
		{"upgrade", upgrade}, {"without-controller", withoutController}, {"removal", removal}, {"csi-sanity", csiSanity}, {"documented", documented},
	})
}

// helm runs a command of helm that must succeed.
func (s *space) helm(args ...string) {
	s.t.Helper()
	s.succeeds(s.Helm(step(s.t), args...))
}

// roll runs a command of helm that gives the release another revision, and waits until the pods are of it.
func (s *space) roll(args ...string) {
	s.t.Helper()
	s.helm(append(args, "--wait", "--timeout", "4m")...)
	s.system("rollout", "status", "daemonset/crust-node", "--timeout=4m")
}

// system runs a command of kubectl that must succeed, in the namespace of the release.
func (s *space) system(args ...string) string {
	s.t.Helper()
	return s.succeeds(s.Kubectl(step(s.t), append([]string{"--namespace", namespace}, args...)...))
}

// upgrade replaces the node's pods under a running microVM by an upgrade, and by taking that back.
func upgrade(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	certificates := s.system("get", "secrets", "--selector", "app.kubernetes.io/name=crust", "-o", "jsonpath={.items[*].data}")
	want := ""
	for _, args := range [][]string{
		{"upgrade", "crust", s.root + "/deploy/helm/crust", "--reset-then-reuse-values", "--set", "log.level=debug"},
		{"rollback", "crust"},
	} {
		before := s.system("get", "pods", "--selector", "app.kubernetes.io/component=node", "-o", "name")
		s.roll(args...)
		if after := s.system("get", "pods", "--selector", "app.kubernetes.io/component=node", "-o", "name"); after == before {
			s.t.Errorf("helm %s has replaced nothing: %s", args[0], after)
		}
		line := fmt.Sprintf("written after helm %s\n", args[0])
		want += line
		s.sh("app", fmt.Sprintf("printf '%s' >> /data/f; sync", strings.ReplaceAll(line, "\n", "\\n")))
	}
	if certificates == "" || certificates != s.system("get", "secrets", "--selector", "app.kubernetes.io/name=crust", "-o", "jsonpath={.items[*].data}") {
		s.t.Error("the certificates are not what they were")
	}
	if n := s.running("app").Status.ContainerStatuses[0].RestartCount; n != 0 {
		s.t.Errorf("the pod was restarted %d times", n)
	}
	s.gone("app")
	s.pod("next", onHost, "data")
	s.running("next")
	if got := s.sh("next", "cat /data/f"); got != strings.TrimSpace(want) {
		s.t.Errorf("%q", got)
	}
}

// withoutController: as the documents say, the nodes cut their snapshots themselves, and delete those from before; then the
// controller takes over what they have cut.
func withoutController(s *space) {
	blocks, err := docs.Blocks(filepath.Join(s.root, "docs"))
	must(s.t, err)
	r := newReader(s)
	r.write("nodes.yaml", block(s, blocks, "yaml values", "sidecar: node"))
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "echo one > /data/f; sync")
	s.snapshot("of-the-controller", "data", "crust")

	s.SnapshotController.Kill()
	must(s.t, s.SnapshotController.Start("--enable-distributed-snapshotting"))
	s.roll("upgrade", "crust", s.root+"/deploy/helm/crust", "--reset-then-reuse-values", "--values", r.path("nodes.yaml"),
		"--set", "snapshotMetadata.enabled=false,snapshots.groups=false")
	s.system("wait", "pods", "--selector", "app.kubernetes.io/component=controller", "--for=delete", "--timeout=4m")
	s.sh("app", "echo two > /data/f") // and no sync
	s.snapshot("of-the-node", "data", "crust-filesystem")
	before, cut := s.content("of-the-controller"), s.content("of-the-node")
	for snapshot, want := range map[string]string{"of-the-controller": "one", "of-the-node": "two"} {
		s.claim(snapshot, "256Mi", from("VolumeSnapshot", snapshot))
		s.pod(snapshot, microVM, snapshot)
		s.running(snapshot)
		if got := s.sh(snapshot, "cat /data/f"); got != want {
			s.t.Errorf("snapshot %s has %q", snapshot, got)
		}
		s.gone(snapshot)
	}
	s.kubectl("delete", "volumesnapshot", "of-the-controller", "--wait=false")
	s.kubectl("wait", "volumesnapshotcontent/"+before, "--for=jsonpath={.metadata.deletionTimestamp}", "--timeout=4m")
	r.names = append(r.names, "snapcontent-abcde", before)
	r.run(labelling)
	s.kubectl("wait", "volumesnapshotcontent/"+before, "--for=delete", "--timeout=4m")

	s.roll("rollback", "crust")
	s.SnapshotController.Kill()
	must(s.t, s.SnapshotController.Start())
	s.kubectl("delete", "volumesnapshot", "of-the-node", "--timeout=4m")
	s.kubectl("wait", "volumesnapshotcontent/"+cut, "--for=delete", "--timeout=4m")
}

// removal: helm uninstall is refused while a pod has a volume, and what is installed anew finds the data.
func removal(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "echo kept > /data/f; sync")
	out, err := s.Helm(step(s.t), "uninstall", "crust", "--timeout", "3m").CombinedOutput()
	if err == nil || !strings.Contains(string(out), s.volume("data").Name) {
		s.t.Fatalf("helm uninstall with a volume in use: %v\n%s", err, out)
	}
	s.system("rollout", "status", "daemonset/crust-node", "--timeout=1m")
	s.system("get", "csidriver", Driver)
	if got := s.sh("app", "cat /data/f"); got != "kept" {
		s.t.Errorf("%q", got)
	}
	s.gone("app")
	for _, kind := range []string{"daemonset.apps/", "csidriver.storage.k8s.io/", "clusterrole.rbac.authorization.k8s.io/", "secret/"} {
		if all := s.ofTheChart(); !strings.Contains(all, kind) {
			s.t.Fatalf("%s is not among what the chart has made: %s", kind, all)
		}
	}
	s.helm("uninstall", "crust", "--wait", "--timeout", "4m")
	eventually(s.t, "nothing of the chart is left", func(context.Context) error {
		if left := s.ofTheChart(); left != "" {
			return errors.New(left)
		}
		return nil
	})
	must(s.t, s.install(step(s.t)))
	s.pod("again", microVM, "data")
	s.running("again")
	if got := s.sh("again", "cat /data/f"); got != "kept" {
		s.t.Errorf("%q", got)
	}
}

// ofTheChart lists the objects that carry the chart's label, whatever their kind.
func (s *space) ofTheChart() string {
	s.t.Helper()
	kinds := "pods,daemonsets,deployments,replicasets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,jobs," +
		"csidrivers,storageclasses,runtimeclasses,clusterroles,clusterrolebindings,volumesnapshotclasses,snapshotmetadataservices"
	return s.system("get", kinds, "--selector", "app.kubernetes.io/part-of=crust", "-o", "name")
}

// csiSanity asks the installed driver by itself, and through the daemon, where the kubelet asks.
func csiSanity(s *space) {
	// crustd, which knows pods, wants to know whose a volume is, unless the class says that it does not matter.
	sanity.Run(s.t, s.path("kubelet"), map[string]string{deferred.ParameterDefer: "never"}, runDirectory+"/csi.sock", s.path("kubelet/plugins", Driver, "csi.sock"))
}
