package kata

import (
	"context"
	"net/http"
	"time"

	"crust.dev/crust/runtimehandler"
)

// MetricStats is what Stats falls back on.
func (h *Handler) MetricStats(ctx context.Context, targetPath, device string, s runtimehandler.Sandbox) (runtimehandler.Stats, error) {
	return h.metricStats(ctx, targetPath, device, s)
}

// ParseMetrics returns all usages in a sandbox's metrics.
func ParseMetrics(text string) []runtimehandler.Usage {
	mounts, err := parseMetrics([]byte(text))
	if err != nil {
		return nil
	}
	var list []runtimehandler.Usage
	for _, m := range mounts {
		list = append(list, runtimehandler.Usage(m.bytes), runtimehandler.Usage(m.inodes))
	}
	return list
}

// ParseStats reads an answer of the Go runtime.
func ParseStats(text string) (runtimehandler.Stats, error) {
	return parseStats(answer{code: http.StatusOK, body: []byte(text)}, nil)
}

// ParseBundle returns the mount sources of an OCI configuration.
func ParseBundle(text string) []string {
	uses, err := parseBundle([]byte(text), time.Time{})
	if err != nil {
		return nil
	}
	var list []string
	for _, u := range uses {
		list = append(list, u.Source)
	}
	return list
}
