package kata

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/kata/config"
)

// proven says whether a runtime's own traces prove that it has attached a volume's device to a sandbox.
func (h *Handler) proven(c candidate, device string) (bool, error) {
	if c.runtime == config.Go {
		return h.provenByGo(c, device)
	}
	return h.provenByRust(c)
}

// goMount is a mount in the state that the Go runtime keeps of a container (virtcontainers/persist/api).
type goMount struct {
	Source        string
	Destination   string
	BlockDeviceID string
}

// provenByGo wants both traces: the mark, which says that the runtime has read the record, and in the state of a container
// a mount of the device that has a block device's id. Without the id the device was not attached.
func (h *Handler) provenByGo(c candidate, device string) (bool, error) {
	if c.marked.IsZero() {
		return false, nil
	}
	mounts, err := h.goMounts(c.sandbox.ID)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(mounts, func(m goMount) bool { return m.Source == device && m.BlockDeviceID != "" }), nil
}

// goMounts returns the mounts in the states of a sandbox's containers. A state that is just being written is not there
// yet.
func (h *Handler) goMounts(sandboxID string) ([]goMount, error) {
	states, err := filepath.Glob(filepath.Join(h.paths.goSandboxes, sandboxID, "*", "persist.json"))
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", sandboxID, err)
	}
	var mounts []goMount
	for _, path := range states {
		raw, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("sandbox %s: %w", sandboxID, err)
		}
		var state struct{ Mounts []goMount }
		if json.Unmarshal(raw, &state) == nil {
			mounts = append(mounts, state.Mounts...)
		}
	}
	return mounts, nil
}

// provenByRust wants the directory that runtime-rs makes for each mount of a direct volume. Its name ends in the last
// element of the path in the container, and says nothing else of the volume; so if several volumes end alike, all of them
// have to be there.
func (h *Handler) provenByRust(c candidate) (bool, error) {
	for _, base := range c.bases() {
		traces, err := h.passthrough(c.sandbox.ID, base)
		if err != nil {
			return false, err
		}
		devices := map[string]bool{}
		for _, t := range traces {
			devices[t.device] = true
		}
		if sources := h.directSources(c, base); len(sources) > 0 && len(devices) >= len(sources) {
			return true, nil
		}
	}
	return false, nil
}

// bases returns the last elements of the paths at which a sandbox's containers have the volume.
func (c candidate) bases() []string {
	var bases []string
	for _, u := range c.uses {
		bases = append(bases, filepath.Base(u.Destination))
	}
	slices.Sort(bases)
	return slices.Compact(bases)
}

// directSources returns the mount sources of a sandbox's containers that have a record, whosever it is, and end alike in
// the container.
func (h *Handler) directSources(c candidate, base string) []string {
	var sources []string
	for _, u := range c.mounts {
		if filepath.Base(u.Destination) != base || len(u.Source) > maxSource {
			continue
		}
		if _, err := os.Lstat(filepath.Join(h.paths.records, recordName(u.Source))); err == nil {
			sources = append(sources, u.Source)
		}
	}
	slices.Sort(sources)
	return slices.Compact(sources)
}

// trace is a directory that runtime-rs has made for a mount. The guest mounts the volume under the same name.
type trace struct{ name, device string }

// tracePattern is the form of a trace's name: ten digits of the device's id, eight of a random number, and the last element
// of the path in the container.
var tracePattern = regexp.MustCompile(`^([0-9a-f]{10})-[0-9a-f]{8}-(.+)$`)

// passthrough returns the traces of direct volumes whose mounts end in base. A directory that is shared with the guest has
// a name of the same form, but something is mounted on it, or in it.
func (h *Handler) passthrough(sandboxID, base string) ([]trace, error) {
	dir := filepath.Join(h.paths.shared, sandboxID, "rw", "passthrough")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, ignoreNotExist(err)
	}
	var traces []trace
	for _, e := range entries {
		parts := tracePattern.FindStringSubmatch(e.Name())
		if parts == nil || parts[2] != base || !e.IsDir() {
			continue
		}
		plain, err := emptyDirectory(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("sandbox %s: %w", sandboxID, err)
		}
		if plain {
			traces = append(traces, trace{name: e.Name(), device: parts[1]})
		}
	}
	return traces, nil
}

// emptyDirectory says whether a path is an empty directory on which nothing is mounted.
func emptyDirectory(path string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &st); err != nil {
		return false, ignoreNotExist(err)
	}
	if st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return false, fmt.Errorf("%s: the kernel does not say what is a mount point (it needs 5.8): %w", path, errdefs.ErrNotImplemented)
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return false, nil
	}
	entries, err := os.ReadDir(path)
	return err == nil && len(entries) == 0, ignoreNotExist(err)
}
