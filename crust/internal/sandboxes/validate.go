package sandboxes

import (
	"fmt"
	"regexp"

	"github.com/containerd/errdefs"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
)

// What one shim may ask for at a time.
const (
	maxMounts  = 1024
	maxFSTypes = 64
)

var (
	sandboxID   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	runtimeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	fsType      = regexp.MustCompile(`^[a-z0-9][a-z0-9_.-]{0,31}$`)
)

func validRegistration(req *runtimev1.RegisterSandboxRequest) error {
	switch {
	case !sandboxID.MatchString(req.GetSandboxId()):
		return invalid("sandbox_id", req.GetSandboxId(), sandboxID)
	case !runtimeName.MatchString(req.GetRuntime()):
		return invalid("runtime", req.GetRuntime(), runtimeName)
	case len(req.GetFsTypes()) == 0 || len(req.GetFsTypes()) > maxFSTypes:
		return fmt.Errorf("%d fs_types, want 1 to %d: %w", len(req.GetFsTypes()), maxFSTypes, errdefs.ErrInvalidArgument)
	case req.GetVmmPid() < 0 || req.GetVmmPid() > 1<<22:
		return fmt.Errorf("vmm_pid %d: %w", req.GetVmmPid(), errdefs.ErrInvalidArgument)
	}
	for _, t := range req.GetFsTypes() {
		if !fsType.MatchString(t) {
			return invalid("fs_types", t, fsType)
		}
	}
	if _, err := rpc.ParseEndpoint(req.GetAddress()); err != nil {
		return fmt.Errorf("address: %w", err)
	}
	return nil
}

func invalid(field, value string, want *regexp.Regexp) error {
	if len(value) > 80 {
		value = value[:80] + "..."
	}
	return fmt.Errorf("%s %q: want %s: %w", field, value, want, errdefs.ErrInvalidArgument)
}
