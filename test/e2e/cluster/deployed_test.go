package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"crust.dev/crust/protocol/csi/deferred"
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
		s.helm(append(args, "--wait", "--timeout", "4m")...)
		s.system("rollout", "status", "daemonset/crust-node", "--timeout=4m")
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

// withoutController: the nodes cut their snapshots themselves, and the controller takes over what they have cut.
func withoutController(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "echo one > /data/f; sync")
	s.snapshot("of-the-controller", "data", "crust")

	args := s.SnapshotController.Args()
	must(s.t, s.SnapshotController.Restart(append(args, "--enable-distributed-snapshotting")))
	s.t.Cleanup(func() { must(s.t, s.SnapshotController.Restart(args)) })
	s.helm("upgrade", "crust", s.root+"/deploy/helm/crust", "--reset-then-reuse-values", "--wait", "--timeout", "4m",
		"--set", "controller.enabled=false,snapshotMetadata.enabled=false,snapshots.groups=false,snapshots.sidecar=node")
	s.t.Cleanup(func() {
		s.helm("rollback", "crust", "--wait", "--timeout", "4m")
		s.system("rollout", "status", "daemonset/crust-node", "--timeout=4m")
		s.kubectl("delete", "volumesnapshots", "--all", "--timeout=4m")
		eventually(s.t, "the controller deletes what the node has cut", func(context.Context) error {
			if left := s.kubectl("get", "volumesnapshotcontents", "-o", "name"); left != "" {
				return errors.New(left)
			}
			return nil
		})
	})
	s.system("rollout", "status", "daemonset/crust-node", "--timeout=4m")
	if left := s.system("get", "deployments", "-o", "name"); left != "" {
		s.t.Errorf("there is %s", left)
	}
	s.sh("app", "echo two > /data/f") // and no sync
	s.snapshot("of-the-node", "data", "crust-filesystem")
	for snapshot, want := range map[string]string{"of-the-controller": "one", "of-the-node": "two"} {
		s.claim(snapshot, "256Mi", from("VolumeSnapshot", snapshot))
		s.pod(snapshot, microVM, snapshot)
		s.running(snapshot)
		if got := s.sh(snapshot, "cat /data/f"); got != want {
			s.t.Errorf("snapshot %s has %q", snapshot, got)
		}
		s.gone(snapshot)
	}

	// What a node is to delete needs the label that only the contents of its time have been given.
	content := s.kubectl("get", "volumesnapshot", "of-the-controller", "-o", "jsonpath={.status.boundVolumeSnapshotContentName}")
	s.kubectl("label", "volumesnapshotcontent", content, "snapshot.storage.kubernetes.io/managed-by="+Node)
	s.kubectl("delete", "volumesnapshot", "of-the-controller", "--timeout=4m")
	s.kubectl("wait", "volumesnapshotcontent/"+content, "--for=delete", "--timeout=4m")
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
