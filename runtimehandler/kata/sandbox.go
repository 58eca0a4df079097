package kata

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/config"
)

// candidate is a living sandbox that may have a volume.
type candidate struct {
	sandbox runtimehandler.Sandbox
	runtime config.Runtime
	// mounts are those of its containers, of whatever source, as far as they are known.
	mounts []use
	// uses are those of mounts that are the volume, or a part of it.
	uses []use
	// marked is when the Go runtime has left its mark beside the record, which it then has read; zero: it has not.
	marked time.Time
	// since is when the sandbox became reachable.
	since time.Time
}

// kindPrefix begins the name of the runtime in a runtimehandler.Sandbox.
const kindPrefix = "kata-"

// locate returns the living sandboxes that may have a volume, the newest first: those that the Go runtime has marked, those
// one of whose containers mounts the target path, and those of the pod to which the path belongs. Marks outlive their
// sandbox, and a pod may have had several, so only those count on whose socket somebody listens. ErrUnavailable if none is
// found and the container runtime does not answer.
func (h *Handler) locate(ctx context.Context, targetPath string) ([]candidate, error) {
	source, err := resolve(targetPath)
	if err != nil {
		return nil, err
	}
	marks, err := h.marks(recordName(source))
	if err != nil {
		return nil, err
	}
	mounts, ready, criErr := h.mounts(ctx, source)
	ours := func(u use) bool { return concerns(u, source, targetPath) }
	ids := append(slices.Collect(maps.Keys(marks)), ready...)
	for id, list := range mounts {
		if slices.ContainsFunc(list, ours) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	var found []candidate
	for _, id := range slices.Compact(ids) {
		c, ok, err := h.candidate(ctx, id)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		c.marked, c.mounts = marks[id], mounts[id]
		for _, u := range c.mounts {
			if ours(u) {
				c.uses = append(c.uses, u)
			}
		}
		found = append(found, c)
	}
	if len(found) == 0 && criErr != nil {
		return nil, criErr
	}
	slices.SortStableFunc(found, func(a, b candidate) int { return b.since.Compare(a.since) })
	return found, nil
}

// marks returns the sandboxes that have left a mark beside a record, and when: all names that are not the record's own.
func (h *Handler) marks(name string) (map[string]time.Time, error) {
	entries, err := os.ReadDir(filepath.Join(h.paths.records, name))
	if err != nil && !errors.Is(err, syscall.ENAMETOOLONG) {
		return nil, ignoreNotExist(err)
	}
	ids := map[string]time.Time{}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.Name() != infoName && info.Mode().IsRegular() {
			ids[e.Name()] = info.ModTime()
		}
	}
	return ids, nil
}

// mounts returns the mounts of the containers of all sandboxes, by sandbox, and the sandboxes that are ready of the pod to
// which a source belongs. The former are from the OCI bundles, which have the container runtime's own words, and from CRI
// for sandboxes whose bundles are not to be seen; the latter are known by CRI only.
func (h *Handler) mounts(ctx context.Context, source string) (mounts map[string][]use, ready []string, err error) {
	mounts = h.bundles.all()
	pod := podOf(source)
	if h.cri == nil || pod == "" {
		return mounts, nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, h.config.CallTimeout)
	defer cancel()
	sandboxes, err := h.cri.Sandboxes(ctx, pod)
	for _, s := range sandboxes {
		ready = append(ready, s.ID)
		if len(mounts[s.ID]) > 0 {
			continue
		}
		for _, c := range s.Containers {
			for _, m := range c.Mounts {
				mounts[s.ID] = append(mounts[s.ID], use{Sandbox: s.ID, Source: m.HostPath, Destination: m.ContainerPath, Since: c.Created})
			}
		}
	}
	return mounts, ready, err
}

// podOf returns the uid of the pod in whose directory a path is, or nothing (pods/UID/ of the kubelet).
func podOf(path string) string {
	_, rest, ok := strings.Cut(path, "/pods/")
	uid, _, more := strings.Cut(rest, "/")
	if !ok || !more {
		return ""
	}
	return uid
}

// subPaths is the directory in which the kubelet puts the subPaths of a pod's volumes:
// pods/UID/volume-subpaths/VOLUME/CONTAINER/N.
const subPaths = "/volume-subpaths/"

// concerns says whether a mount is that of a volume, or of a part of it (subPath).
func concerns(u use, source, targetPath string) bool {
	if u.Source == source || u.Source == targetPath {
		return true
	}
	pod, rest, ok := strings.Cut(source, "/volumes/kubernetes.io~csi/")
	volume, _, more := strings.Cut(rest, "/")
	return ok && more && strings.HasPrefix(u.Source, pod+subPaths+volume+"/")
}

// subPath says whether a mount is that of a part of a volume.
func (u use) subPath() bool { return strings.Contains(u.Source, subPaths) }

// candidate returns a sandbox if it lives. The Go runtime's place comes first, as it does for Kata's own tools.
func (h *Handler) candidate(ctx context.Context, id string) (candidate, bool, error) {
	if id != filepath.Base(id) || strings.HasPrefix(id, ".") {
		return candidate{}, false, nil
	}
	for _, place := range []struct {
		runtime config.Runtime
		root    string
	}{{config.Go, h.paths.goSandboxes}, {config.Rust, h.paths.rustSandboxes}} {
		socket := filepath.Join(place.root, id, socketName)
		info, err := os.Lstat(socket)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			continue // there are plain files among the directories of sandboxes
		}
		if err != nil {
			return candidate{}, false, fmt.Errorf("sandbox %s: %w", id, err)
		}
		alive, err := h.listens(ctx, socket)
		if err != nil || !alive {
			return candidate{}, false, err
		}
		s := runtimehandler.Sandbox{ID: id, Runtime: kindPrefix + string(place.runtime), Address: socket}
		return candidate{sandbox: s, runtime: place.runtime, since: info.ModTime()}, true, nil
	}
	return candidate{}, false, nil
}

// listens says whether somebody listens on a socket. A shim that has died leaves its socket.
func (h *Handler) listens(ctx context.Context, socket string) (bool, error) {
	dialer := net.Dialer{Timeout: h.config.CallTimeout}
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err == nil {
		return true, conn.Close()
	}
	if refused(err) {
		return false, nil
	}
	return false, fmt.Errorf("sandbox at %s: %w: %w", socket, err, errdefs.ErrUnavailable)
}
