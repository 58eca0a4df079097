package kata

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/runtimehandler"
)

const (
	bytesMetric  = "kata_guest_filesystem_bytes"
	inodesMetric = "kata_guest_filesystem_inodes"

	// goStorage is where the agent mounts block devices for the Go runtime, each under the base64url of how it finds it;
	// rustStorage is where it does for runtime-rs.
	goStorage   = "/run/kata-containers/sandbox/storage/"
	rustStorage = "/run/kata-containers/shared/containers/passthrough/"
)

// guestMount is a filesystem of the guest in its metrics. There is one per device.
type guestMount struct {
	path, device  string
	bytes, inodes usage
}

type usage runtimehandler.Usage

func (u usage) proto(unit runtimev1.VolumeUsage_Unit) *runtimev1.VolumeUsage {
	return &runtimev1.VolumeUsage{Total: u.Total, Available: u.Available, Used: u.Used, Unit: unit}
}

// goStorage returns how the agent finds the device of a mount, if it is one of the Go runtime's.
func (m guestMount) goStorage() (source string, ok bool) {
	name, ok := strings.CutPrefix(m.path, goStorage)
	if !ok {
		return "", false
	}
	raw, err := base64.URLEncoding.DecodeString(name)
	return string(raw), err == nil
}

// parseMetrics reads the filesystems out of a sandbox's metrics. The rest is not parsed: it is put together from three
// sources and need not be well-formed as a whole.
func parseMetrics(raw []byte) ([]guestMount, error) {
	var lines bytes.Buffer
	for line := range bytes.Lines(raw) {
		if bytes.HasPrefix(line, []byte(bytesMetric+"{")) || bytes.HasPrefix(line, []byte(inodesMetric+"{")) {
			lines.Write(bytes.TrimRight(line, "\r\n"))
			lines.WriteByte('\n')
		}
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(&lines)
	if err != nil {
		return nil, fmt.Errorf("not in Prometheus' format: %w", err)
	}
	mounts := map[string]*guestMount{}
	var order []string
	for name, family := range families {
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			path := labels["mount"]
			if mounts[path] == nil {
				mounts[path] = &guestMount{path: path, device: labels["device"]}
				order = append(order, path)
			}
			into := &mounts[path].bytes
			if name == inodesMetric {
				into = &mounts[path].inodes
			}
			into.set(labels["item"], value(m))
		}
	}
	slices.Sort(order)
	var list []guestMount
	for _, path := range order {
		list = append(list, *mounts[path])
	}
	return list, nil
}

// value is a metric's value, of whatever type. What is no whole number of int64 becomes -1, which no usage may have.
func value(m *dto.Metric) int64 {
	v := m.GetUntyped().GetValue() + m.GetGauge().GetValue() + m.GetCounter().GetValue()
	if math.IsNaN(v) || v < 0 || v >= math.MaxInt64 {
		return -1
	}
	return int64(v)
}

func (u *usage) set(item string, v int64) {
	switch item {
	case "total":
		u.Total = v
	case "used":
		u.Used = v
	case "available":
		u.Available = v
	}
}

// goDrive is a device in the state that the Go runtime keeps of a sandbox. How its addresses are encoded has changed over
// time; they are used if they are strings.
type goDrive struct {
	ID         string
	BlockDrive struct{ PCIPath, SCSIAddr, VirtPath any }
}

func (h *Handler) goDrives(sandboxID string) ([]goDrive, error) {
	raw, err := os.ReadFile(filepath.Join(h.paths.goSandboxes, sandboxID, "persist.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", sandboxID, err)
	}
	var state struct{ Devices []goDrive }
	if err := json.Unmarshal(raw, &state); err != nil {
		return nil, nil // it is just being written; there is another way
	}
	return state.Devices, nil
}
