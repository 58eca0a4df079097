package csiplugin

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// Watch lets f add to the context of the start and of each call.
func (p *Plugin) Watch(f func(context.Context) context.Context) { p.watch = f }

// SetBoot makes the plugin believe that the machine's boot id is id.
func (p *Plugin) SetBoot(id string) { p.boot = func() (string, error) { return id, nil } }

// Dispensable is dispensable.
var Dispensable = dispensable

// ParsePath is parsePath.
var ParsePath = parsePath

// PlanSize is planSize.
func PlanSize(r *csi.CapacityRange, smallest, largest int64) (int64, error) {
	return planSize(r, limits{smallest, largest})
}

// PlanExpansion is planExpansion.
func PlanExpansion(r *csi.CapacityRange, size, largest int64) (int64, error) {
	return planExpansion(r, size, limits{0, largest})
}

// ParseCreate is parseCreate.
func ParseCreate(r *csi.CreateVolumeRequest) error {
	_, err := parseCreate(r)
	return err
}

// ParsePublish is parsePublish.
func ParsePublish(r *csi.NodePublishVolumeRequest) error {
	_, err := parsePublish(r)
	return err
}
