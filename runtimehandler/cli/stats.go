package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/runtimehandler"
)

// answer is RuntimeGetVolumeStatsResponse in JSON, as KEP-2857 spells its fields or as Kata does.
type answer struct {
	Usage     []usage    `json:"usage"`
	Condition *condition `json:"volume_condition"`
	Kata      *condition `json:"VolumeCondition"`
}

type usage struct {
	Available int64 `json:"available"`
	Total     int64 `json:"total"`
	Used      int64 `json:"used"`
	Unit      unit  `json:"unit"`
}

type condition struct {
	Abnormal bool   `json:"abnormal"`
	Message  string `json:"message"`
}

// unit is BYTES or INODES, by name or by number.
type unit runtimev1.VolumeUsage_Unit

// UnmarshalJSON reads a unit. Units of a later version read as unspecified, and are left out.
func (u *unit) UnmarshalJSON(raw []byte) error {
	switch string(bytes.ToUpper(bytes.Trim(raw, `"`))) {
	case "1", "BYTES", "UNIT_BYTES":
		*u = unit(runtimev1.VolumeUsage_UNIT_BYTES)
	case "2", "INODES", "UNIT_INODES":
		*u = unit(runtimev1.VolumeUsage_UNIT_INODES)
	default:
		*u = unit(runtimev1.VolumeUsage_UNIT_UNSPECIFIED)
	}
	return nil
}

var _ json.Unmarshaler = (*unit)(nil)

// Stats asks the runtime's command.
func (h *Handler) Stats(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox) (runtimehandler.Stats, error) {
	var a answer
	if err := h.run(ctx, sandbox, &a, "crust", "stats", targetPath); err != nil {
		return runtimehandler.Stats{}, err
	}
	stats, err := a.stats()
	if err != nil {
		return runtimehandler.Stats{}, fmt.Errorf("%s crust stats %s: %w: %w", sandbox.Address, targetPath, err, errdefs.ErrUnavailable)
	}
	return stats, nil
}

func (a answer) stats() (runtimehandler.Stats, error) {
	var list []*runtimev1.VolumeUsage
	for _, u := range a.Usage {
		list = append(list, &runtimev1.VolumeUsage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: runtimev1.VolumeUsage_Unit(u.Unit)})
	}
	c := a.Condition
	if c == nil {
		c = a.Kata
	}
	if c == nil {
		c = &condition{}
	}
	return runtimehandler.StatsFromProto(list, &runtimev1.VolumeCondition{Abnormal: c.Abnormal, Message: c.Message})
}
