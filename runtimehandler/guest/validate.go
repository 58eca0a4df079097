package guest

import (
	"fmt"
	"math"
	"path"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/device"
	"crust.dev/crust/runtimehandler/guest/filesystem"
	"crust.dev/crust/runtimehandler/guest/process"
)

const (
	maxFreeze   = 60 * time.Second // of FreezeVolumeRequest.time_limit
	maxReadWait = 30 * time.Second // of ReadExecRequest.wait
	maxSignal   = 64               // SIGRTMAX
)

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// checkPath accepts an absolute and clean path that is not the root.
func checkPath(field, p string) error {
	if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.ContainsRune(p, 0) {
		return invalid("%s %q: want an absolute and clean path below /", field, p)
	}
	return nil
}

// checkSubPath accepts nothing, or a clean path that goes down only.
func checkSubPath(p string) error {
	if p == "" {
		return nil
	}
	if path.IsAbs(p) || path.Clean(p) != p || p == "." || p == ".." || strings.HasPrefix(p, "../") || strings.ContainsRune(p, 0) {
		return invalid("sub_path %q: want a relative and clean path that does not lead up", p)
	}
	return nil
}

func checkMount(req *guestv1.MountVolumeRequest) (filesystem.Options, error) {
	none := filesystem.Options{}
	serial := req.GetSerial()
	if serial == "" || len(serial) > device.MaxSerial || strings.ContainsFunc(serial, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return none, invalid("serial %q: want 1 to %d printable characters", serial, device.MaxSerial)
	}
	if err := checkPath("mount_path", req.GetMountPath()); err != nil {
		return none, err
	}
	if !filesystem.Known(req.GetFsType()) {
		return none, invalid("fs_type %q: want one of %v", req.GetFsType(), filesystem.Types())
	}
	if req.GetMinDeviceBytes() < 0 {
		return none, invalid("min_device_bytes %d is negative", req.GetMinDeviceBytes())
	}
	if guestv1.FormatPolicy_name[int32(req.GetFormat())] == "" {
		return none, invalid("format %d is unknown", req.GetFormat())
	}
	if err := checkGroup(req); err != nil {
		return none, err
	}
	flags := req.GetMountFlags()
	if req.GetReadOnly() {
		flags = append(flags[:len(flags):len(flags)], "ro")
	}
	return filesystem.ParseOptions(flags)
}

func checkGroup(req *guestv1.MountVolumeRequest) error {
	policy := req.GetSupplementalGroupChangePolicy()
	if guestv1.GroupChangePolicy_name[int32(policy)] == "" {
		return invalid("supplemental_group_change_policy %d is unknown", policy)
	}
	if req.SupplementalGroup == nil {
		if policy != guestv1.GroupChangePolicy_GROUP_CHANGE_POLICY_UNSPECIFIED {
			return invalid("supplemental_group_change_policy without supplemental_group")
		}
		return nil
	}
	if req.GetSupplementalGroup() == math.MaxUint32 {
		return invalid("supplemental_group %d is no group: chown(2) takes it for no change", req.GetSupplementalGroup())
	}
	return nil
}

func checkFreeze(req *guestv1.FreezeVolumeRequest) (time.Duration, error) {
	if err := checkPath("mount_path", req.GetMountPath()); err != nil {
		return 0, err
	}
	limit, err := duration("time_limit", req.GetTimeLimit(), maxFreeze)
	if err == nil && limit <= 0 {
		err = invalid("time_limit %v: want more than zero", limit)
	}
	return limit, err
}

func duration(field string, d *durationpb.Duration, most time.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	if err := d.CheckValid(); err != nil {
		return 0, invalid("%s: %v", field, err)
	}
	if v := d.AsDuration(); v < 0 || v > most {
		return 0, invalid("%s %v: want 0 to %v", field, v, most)
	}
	return d.AsDuration(), nil
}

func checkBind(req *guestv1.BindPathRequest) error {
	if err := checkPath("mount_path", req.GetMountPath()); err != nil {
		return err
	}
	if err := checkSubPath(req.GetSubPath()); err != nil {
		return err
	}
	return checkPath("destination", req.GetDestination())
}

func checkExec(req *guestv1.StartExecRequest) (process.Spec, error) {
	s := process.Spec{Argv: req.GetArgv(), Env: req.GetEnv(), Dir: req.GetCwd(), Stdin: req.GetStdin()}
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return s, invalid("argv is empty")
	}
	for _, word := range append(s.Argv[:len(s.Argv):len(s.Argv)], s.Env...) {
		if strings.ContainsRune(word, 0) {
			return s, invalid("argv or env has a zero byte")
		}
	}
	for _, e := range s.Env {
		if strings.Index(e, "=") < 1 {
			return s, invalid("env %q: want NAME=value", e)
		}
	}
	if s.Dir != "" && (!path.IsAbs(s.Dir) || strings.ContainsRune(s.Dir, 0)) {
		return s, invalid("cwd %q: want an absolute path", s.Dir)
	}
	c := req.GetContainer()
	if c == nil {
		return s, nil
	}
	if err := checkPath("container.root", c.GetRoot()); err != nil {
		return s, err
	}
	for _, id := range append([]uint32{c.GetUid(), c.GetGid()}, c.GetAdditionalGids()...) {
		if id == math.MaxUint32 {
			return s, invalid("user or group %d is none: setuid(2) takes it for no change", id)
		}
	}
	s.Container = &process.Container{Root: c.GetRoot(), UID: c.GetUid(), GID: c.GetGid(), Groups: c.GetAdditionalGids(), Join: c.GetJoin()}
	return s, nil
}

// checkRoot accepts what a root filesystem can be made of.
func checkRoot(req *guestv1.PrepareRootRequest) ([]filesystem.RootMount, error) {
	if err := checkPath("mount_path", req.GetMountPath()); err != nil {
		return nil, err
	}
	odd := func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
	}
	var mounts []filesystem.RootMount
	for _, m := range req.GetMounts() {
		if err := checkPath("destination", m.GetDestination()); err != nil {
			return nil, err
		}
		if name := m.GetShared(); strings.ContainsFunc(name, odd) || name == "." || name == ".." || len(name) > 255 {
			return nil, invalid("shared %q: want letters, digits, '.', '_' and '-'", name)
		}
		mounts = append(mounts, filesystem.RootMount{Destination: m.GetDestination(), Shared: m.GetShared(), ReadOnly: m.GetReadOnly()})
	}
	return mounts, nil
}
