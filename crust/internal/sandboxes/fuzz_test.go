package sandboxes

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
)

// FuzzRegistration feeds what a shim can send. What is accepted is safe to log, to use as a name, and to dial.
func FuzzRegistration(f *testing.F) {
	for _, req := range []*runtimev1.RegisterSandboxRequest{
		{SandboxId: "s1", Runtime: "qemu", Address: "unix:///run/s1.sock", FsTypes: []string{"ext4", "xfs"}, VmmPid: 7},
		{SandboxId: "../s1", Runtime: "a\nb", Address: "relative", FsTypes: []string{""}, VmmPid: -1},
		{SandboxId: strings.Repeat("x", 65), Runtime: "qemu", Address: "/run/../s1.sock", FsTypes: []string{"ext4"}},
	} {
		raw, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		req := &runtimev1.RegisterSandboxRequest{}
		if proto.Unmarshal(raw, req) != nil {
			return
		}
		if err := validRegistration(req); err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("error %v", err)
			}
			return
		}
		id, address := req.GetSandboxId(), strings.TrimPrefix(req.GetAddress(), "unix://")
		if filepath.Base(id) != id || id == ".." || len(id) > 64 || strings.ContainsAny(id+req.GetRuntime(), "\n\r\x00 /") {
			t.Errorf("accepted id %q, runtime %q", id, req.GetRuntime())
		}
		if !filepath.IsAbs(address) || filepath.Clean(address) != address {
			t.Errorf("accepted address %q", req.GetAddress())
		}
		if req.GetVmmPid() < 0 || len(req.GetFsTypes()) == 0 {
			t.Errorf("accepted %v", req)
		}
	})
}
