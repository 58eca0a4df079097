package containerdshim

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"crust.dev/crust/runtimehandler/shim"
)

// The annotations with which containerd's CRI plugin says what a container is (its internal/cri/annotations).
const (
	annotationType    = "io.kubernetes.cri.container-type"
	annotationSandbox = "io.kubernetes.cri.sandbox-id"
	typeSandbox       = "sandbox"
)

// plan is what becomes of a container's mounts.
type plan struct {
	copies  []copied // in the order of the specification
	shared  []shared
	volumes []shim.Mount // deferrals
}

// copied is something of the host's that goes into the root filesystem once.
type copied struct {
	source, destination string
	readOnly            bool
}

// shared is a directory in the guest's memory.
type shared struct {
	name, destination string
	readOnly          bool
}

// guestTypes are filesystems of the kernel; the guest's own are mounted where containers expect them.
var guestTypes = []string{"proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue"}

// podFiles are what the kubelet and containerd give to every container, whatever the paths on the host are.
var podFiles = []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/termination-log"}

// The kubelet's paths of volumes: pods/<uid>/volumes/<plugin>/<name>.
var (
	emptyDir = regexp.MustCompile(`/pods/[^/]+/volumes/kubernetes\.io~empty-dir/([^/]+)$`)
	ofAPI    = regexp.MustCompile(`/pods/[^/]+/volumes/kubernetes\.io~(configmap|secret|projected|downward-api)/`)
	logFile  = regexp.MustCompile(`/pods/[^/]+/containers/[^/]+/[^/]+$`)
)

// planMounts decides about the mounts of a container. deferrals are the indices of those that crustd has claimed for us.
// ErrFailedPrecondition names a mount that cannot be had, why, and what would help.
func planMounts(id string, mounts []specs.Mount, deferrals []int) (plan, error) {
	var p plan
	for i, m := range mounts {
		ro := readOnly(m.Options)
		destination := path.Clean(m.Destination)
		name := emptyDir.FindStringSubmatch(m.Source)
		switch {
		case slices.Contains(deferrals, i):
			p.volumes = append(p.volumes, ociMount(m))
		case slices.Contains(guestTypes, m.Type), destination == "/dev", destination == "/dev/shm":
			// the guest has them
		case m.Type == "tmpfs":
			p.shared = append(p.shared, shared{fmt.Sprintf("%.16s-%d", id, i), destination, ro})
		case name != nil:
			p.shared = append(p.shared, shared{"empty-dir-" + name[1], destination, ro})
		case ofAPI.MatchString(m.Source):
			p.copies = append(p.copies, copied{m.Source, destination, true})
		case slices.Contains(podFiles, destination), logFile.MatchString(m.Source):
			p.copies = append(p.copies, copied{m.Source, destination, ro})
		default:
			return plan{}, fmt.Errorf("mount of %s at %s: it is no deferred volume, and directories of the host are not shared with the microVM; "+
				"have the volume deferred (StorageClass parameter or pod annotation crust.dev/defer), use an emptyDir, or run the pod with another RuntimeClass: %w",
				m.Source, m.Destination, errdefs.ErrFailedPrecondition)
		}
	}
	return p, nil
}

func ociMount(m specs.Mount) shim.Mount {
	return shim.Mount{Destination: path.Clean(m.Destination), Type: m.Type, Source: m.Source, Options: m.Options}
}

// readOnly says whether mount options ask for a read-only mount; the last one counts.
func readOnly(options []string) bool {
	ro := false
	for _, o := range options {
		ro = o == "ro" || ro && o != "rw"
	}
	return ro
}

// candidates are the mounts of which crustd is asked whether they are deferrals, and their places in the list.
func candidates(mounts []specs.Mount) (list []shim.Mount, index []int) {
	for i, m := range mounts {
		if m.Type == "bind" || slices.ContainsFunc(m.Options, func(o string) bool { return o == "bind" || o == "rbind" }) {
			list, index = append(list, ociMount(m)), append(index, i)
		}
	}
	return list, index
}

// checkSpec refuses what a container would silently not get.
func checkSpec(s *specs.Spec) error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, errdefs.ErrFailedPrecondition)...)
	}
	switch {
	case s.Process == nil || s.Root == nil || s.Linux == nil:
		return fmt.Errorf("the OCI specification has no process, root or linux: %w", errdefs.ErrInvalidArgument)
	case s.Process.Terminal:
		return fail("a terminal (tty) is not supported by this runtime; leave tty: true and kubectl exec -t away")
	case len(s.Linux.Devices) > 0 && s.Annotations[annotationType] != typeSandbox && hasBlockDevice(s):
		return fail("block devices are not handed to containers by this runtime; use a volume with volumeMode: Filesystem")
	}
	for _, n := range s.Linux.Namespaces {
		if n.Type == specs.NetworkNamespace && s.Annotations[annotationType] == typeSandbox {
			return fail("the pod asks for a network of its own, and a microVM of this runtime has none; set hostNetwork: true")
		}
	}
	return nil
}

func hasBlockDevice(s *specs.Spec) bool {
	return slices.ContainsFunc(s.Linux.Devices, func(d specs.LinuxDevice) bool { return strings.HasPrefix(d.Type, "b") })
}
