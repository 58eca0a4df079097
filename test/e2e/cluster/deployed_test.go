package cluster

import (
	"testing"
)

// TestDeployed plays scenarios on what users install: the chart's pods, with the images of this project.
func TestDeployed(t *testing.T) {
	k := startKube(t, StartDeployed)
	k.play(t, []scenario{{"first-pod", firstPod}, {"expansion", expansion}, {"taking-turns", takingTurns}, {"snapshots", snapshots}, {"rollout", rollout}})
}

// rollout restarts the node's pods while a microVM has a volume, as an upgrade does.
func rollout(s *space) {
	s.claim("data", "256Mi")
	s.pod("app", microVM, "data")
	s.running("app")
	s.sh("app", "echo kept > /data/f")
	out, err := s.Kubectl(step(s.t), "--namespace", namespace, "rollout", "restart", "daemonset/crust-node").CombinedOutput()
	if err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	if out, err = s.Kubectl(step(s.t), "--namespace", namespace, "rollout", "status", "daemonset/crust-node", "--timeout=4m").CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	if got := s.sh("app", "cat /data/f; echo more >> /data/f; sync"); got != "kept" {
		s.t.Errorf("%q", got)
	}
	if n := s.running("app").Status.ContainerStatuses[0].RestartCount; n != 0 {
		s.t.Errorf("the pod was restarted %d times", n)
	}
	s.gone("app")
	s.pod("next", onHost, "data")
	s.running("next")
	if got := s.sh("next", "cat /data/f"); got != "kept\nmore" {
		s.t.Errorf("%q", got)
	}
}
