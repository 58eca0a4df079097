package fake_test

import (
	"testing"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/fake"
	"crust.dev/crust/runtimehandler/handlertest"
)

type runtime struct{ *fake.Runtime }

func (r runtime) Mount(t *testing.T, d runtimehandler.Deferral) runtimehandler.Sandbox {
	t.Helper()
	s, err := r.Runtime.Mount(d.TargetPath)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (r runtime) Unmount(_ *testing.T, d runtimehandler.Deferral) { r.Runtime.Unmount(d.TargetPath) }
func (r runtime) Hang(_ *testing.T, d runtimehandler.Deferral)    { r.Runtime.Hang(d.TargetPath) }
func (r runtime) Lose(*testing.T)                                 { r.Runtime.Lose() }

func TestContract(t *testing.T) {
	full := runtimehandler.Capabilities{Format: true, Check: true, Grow: true, OnlineExpand: true, Group: true, SubPath: true, Freeze: true}
	for name, capabilities := range map[string]runtimehandler.Capabilities{"able": full, "unable": {}} {
		t.Run(name, func(t *testing.T) {
			handlertest.Run(t, func(*testing.T) handlertest.Runtime { return runtime{fake.New("fake", capabilities)} })
		})
	}
}
