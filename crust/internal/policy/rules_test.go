package policy_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/crust/internal/policy"
)

// TestSet: new rules hold for decisions that begin afterwards, all or none of them.
func TestSet(t *testing.T) {
	pods := cluster{pods: map[string]policy.Pod{"uid-1": pod("", "kata")}, claims: map[string]string{"ns/claim-1": "pv-1"}}
	p, err := policy.New(policy.Config{DefaultHandler: "remote", Pods: pods})
	if err != nil {
		t.Fatal(err)
	}
	decide := func() policy.Decision {
		t.Helper()
		d, err := p.Decide(t.Context(), policy.Request{VolumeID: "v", TargetPath: target, Capability: mount()})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if decide().Defer {
		t.Error("deferred by default never")
	}
	classes := map[string]string{"kata": "vm"}
	if err := p.Set(policy.Rules{Default: policy.Auto, RuntimeClasses: classes}); err != nil {
		t.Fatal(err)
	}
	delete(classes, "kata") // the caller's map is not the policy's
	if d := decide(); !d.Defer || d.Handler != "vm" {
		t.Errorf("after a change: %+v", d)
	}
	if err := p.Set(policy.Rules{Default: "sometimes"}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("bad rules: %v", err)
	}
	if d := decide(); !d.Defer || d.Handler != "vm" {
		t.Errorf("after bad rules: %+v", d)
	}
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			for range 200 {
				if d, err := p.Decide(t.Context(), policy.Request{VolumeID: "v", TargetPath: target, Capability: mount()}); err != nil || d.Defer && d.Handler != "vm" {
					t.Errorf("a decision by half of the rules: %+v, %v", d, err)
				}
			}
		})
	}
	for i := range 200 {
		rules := policy.Rules{Default: policy.Auto, RuntimeClasses: map[string]string{"kata": "vm"}}
		if i%2 == 0 {
			rules = policy.Rules{Default: policy.Never}
		}
		if err := p.Set(rules); err != nil {
			t.Fatal(err)
		}
	}
	work.Wait()
}
