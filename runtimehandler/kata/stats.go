package kata

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"github.com/containerd/errdefs"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/config"
)

// Stats asks the Go runtime for the volume's statistics, and if that does not answer, or for runtime-rs, which answers in
// a form that is for people only, looks for the volume in the guest's metrics.
//
// In both, what is available is f_bfree of statfs(2), not f_bavail: on an ext4 with blocks reserved for root it is more than
// an unprivileged process may take. Kata says nothing of the health of a filesystem.
func (h *Handler) Stats(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox) (runtimehandler.Stats, error) {
	_, info, err := h.record(targetPath)
	if err != nil {
		return runtimehandler.Stats{}, err
	}
	var direct error
	if runtimeOf(sandbox) == config.Go {
		a, err := h.ask(ctx, sandbox, http.MethodGet, statsTarget(info.Device), nil)
		var silent *unansweredError
		if err != nil && !errors.As(err, &silent) {
			return runtimehandler.Stats{}, err
		}
		stats, err := parseStats(a, err)
		if err == nil {
			return stats, nil
		}
		direct = fmt.Errorf("sandbox %s (%s): statistics of %s: %w", sandbox.ID, sandbox.Runtime, info.Device, err)
	}
	stats, err := h.metricStats(ctx, targetPath, info.Device, sandbox)
	var silent *unansweredError
	if errors.As(err, &silent) && h.hasVolume(ctx, targetPath, info.Device, sandbox) {
		// The guest is up, as it has the volume.
		err = fmt.Errorf("%v; the policy of a confidential guest denies metrics: %w", err, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return runtimehandler.Stats{}, errors.Join(direct, err)
	}
	return stats, nil
}

func runtimeOf(s runtimehandler.Sandbox) config.Runtime {
	if s.Runtime == kindPrefix+string(config.Go) {
		return config.Go
	}
	return config.Rust
}

// hasVolume says whether it is proven that a sandbox has a volume.
func (h *Handler) hasVolume(ctx context.Context, targetPath, device string, sandbox runtimehandler.Sandbox) bool {
	found, err := h.locate(ctx, targetPath)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(found, func(c candidate) bool {
		ok, err := h.proven(c, device)
		return c.sandbox == sandbox && err == nil && ok
	})
}

// statsTarget is the request for the statistics of a device. The Go runtime unescapes the path a second time after the
// query's own decoding, so it is escaped twice.
func statsTarget(device string) string {
	return "/direct-volume/stats?path=" + url.QueryEscape(url.PathEscape(device))
}

// goStats is the Go runtime's answer. Fields that are zero are left out of it; units are numbers.
type goStats struct {
	Usage []struct {
		Available int64                      `json:"available"`
		Total     int64                      `json:"total"`
		Used      int64                      `json:"used"`
		Unit      runtimev1.VolumeUsage_Unit `json:"unit"`
	} `json:"usage"`
	Condition struct {
		Abnormal bool   `json:"abnormal"`
		Message  string `json:"message"`
	} `json:"volume_condition"`
}

// parseStats reads the answer, if there was one. Its status counts: Kata's own command takes the text of an error for an
// answer.
func parseStats(a answer, err error) (runtimehandler.Stats, error) {
	if err != nil {
		return runtimehandler.Stats{}, err
	}
	if a.code != http.StatusOK {
		return runtimehandler.Stats{}, fmt.Errorf("%s: %w", a.text(), errdefs.ErrFailedPrecondition)
	}
	var s goStats
	if err := json.Unmarshal(a.body, &s); err != nil {
		return runtimehandler.Stats{}, fmt.Errorf("the answer is not what Kata documents: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	var usage []*runtimev1.VolumeUsage
	for _, u := range s.Usage {
		usage = append(usage, &runtimev1.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: u.Unit})
	}
	message := s.Condition.Message
	if !s.Condition.Abnormal {
		message = "" // "OK"
	}
	stats, err := runtimehandler.StatsFromProto(usage, &runtimev1.VolumeCondition{Abnormal: s.Condition.Abnormal, Message: message})
	if err != nil {
		return runtimehandler.Stats{}, fmt.Errorf("the answer makes no sense: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return stats, nil
}

// metricStats looks for a volume's filesystem in the guest's metrics (Kata 3.32 and later).
func (h *Handler) metricStats(ctx context.Context, targetPath, device string, sandbox runtimehandler.Sandbox) (runtimehandler.Stats, error) {
	fail := func(err error) (runtimehandler.Stats, error) {
		return runtimehandler.Stats{}, fmt.Errorf("sandbox %s (%s): metrics: %w", sandbox.ID, sandbox.Runtime, err)
	}
	a, err := h.ask(ctx, sandbox, http.MethodGet, "/metrics", nil)
	if err != nil {
		return fail(err)
	}
	if a.code != http.StatusOK {
		return fail(fmt.Errorf("%s: %w", a.text(), errdefs.ErrUnavailable))
	}
	all, err := parseMetrics(a.body)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable))
	}
	find := h.findRustMount
	if runtimeOf(sandbox) == config.Go {
		find = h.findGoMount
	}
	m, err := find(ctx, all, targetPath, device, sandbox)
	if err != nil {
		return fail(err)
	}
	stats, err := runtimehandler.StatsFromProto([]*runtimev1.VolumeUsage{
		m.bytes.proto(runtimev1.VolumeUsage_UNIT_BYTES), m.inodes.proto(runtimev1.VolumeUsage_UNIT_INODES),
	}, nil)
	if err != nil {
		return fail(fmt.Errorf("%s: %w: %w", m.path, err, errdefs.ErrUnavailable))
	}
	return stats, nil
}

// findGoMount finds a device's mount among those under the Go runtime's storage directory. Their names encode how the guest
// finds the device, which the runtime notes in the sandbox's state; failing that, a volume that is the only one needs no
// name.
func (h *Handler) findGoMount(_ context.Context, all []guestMount, _, device string, sandbox runtimehandler.Sandbox) (guestMount, error) {
	known, volumes, err := h.goSources(sandbox.ID, device)
	if err != nil {
		return guestMount{}, err
	}
	var storages []guestMount
	for _, m := range all {
		source, ok := m.goStorage()
		if !ok {
			continue
		}
		if known[source] || known["/dev/"+m.device] {
			return m, nil
		}
		storages = append(storages, m)
	}
	if len(storages) == 1 && volumes == 1 {
		return storages[0], nil
	}
	return guestMount{}, notInMetrics(len(storages), volumes)
}

// findRustMount finds a volume's mount by the traces that runtime-rs has left of it. Nothing in a trace says which volume
// it is but the last element of the path in the container, so that has to be the volume's own.
func (h *Handler) findRustMount(ctx context.Context, all []guestMount, targetPath, _ string, sandbox runtimehandler.Sandbox) (guestMount, error) {
	found, err := h.locate(ctx, targetPath)
	if err != nil {
		return guestMount{}, err
	}
	for _, c := range found {
		if c.sandbox != sandbox {
			continue
		}
		for _, base := range c.bases() {
			if sources := h.directSources(c, base); len(sources) != 1 {
				return guestMount{}, fmt.Errorf("%d volumes of the sandbox are mounted at paths that end in %q, and runtime-rs does not tell which is which: give them mountPaths that end differently: %w",
					len(sources), base, errdefs.ErrFailedPrecondition)
			}
			traces, err := h.passthrough(sandbox.ID, base)
			if err != nil {
				return guestMount{}, err
			}
			for _, m := range all {
				for _, t := range traces {
					if m.path == rustStorage+t.name {
						return m, nil
					}
				}
			}
		}
	}
	return guestMount{}, notInMetrics(0, 0)
}

func notInMetrics(storages, volumes int) error {
	if storages > 0 {
		return fmt.Errorf("there are %d filesystems of %d volumes, and nothing says which is which: %w", storages, volumes, errdefs.ErrFailedPrecondition)
	}
	return fmt.Errorf("the volume's filesystem is not in them: agents before Kata 3.32 do not report filesystems, none reports those that are mounted read-only, and the policy of a confidential guest denies metrics: %w", errdefs.ErrFailedPrecondition)
}

// goSources returns under which names the guest may know a device of the Go runtime, and how many direct volumes the
// sandbox has.
func (h *Handler) goSources(sandboxID, device string) (known map[string]bool, volumes int, err error) {
	mounts, err := h.goMounts(sandboxID)
	if err != nil {
		return nil, 0, err
	}
	ids, sources := map[string]bool{}, map[string]bool{}
	for _, m := range mounts {
		if m.BlockDeviceID == "" {
			continue
		}
		sources[m.Source] = true
		if m.Source == device {
			ids[m.BlockDeviceID] = true
		}
	}
	drives, err := h.goDrives(sandboxID)
	if err != nil {
		return nil, 0, err
	}
	known = map[string]bool{}
	for _, d := range drives {
		if !ids[d.ID] {
			continue
		}
		for _, value := range []any{d.BlockDrive.PCIPath, d.BlockDrive.SCSIAddr, d.BlockDrive.VirtPath} {
			if text, ok := value.(string); ok && text != "" {
				known[text] = true
			}
		}
	}
	return known, len(sources), nil
}
