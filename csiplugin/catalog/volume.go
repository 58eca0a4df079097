package catalog

import (
	"time"

	"crust.dev/crust/csiplugin/handle"
)

// State is how far a volume, or a publish, has come.
type State string

// States of a volume, a snapshot or a group snapshot.
const (
	// Creating: its data file may or may not exist, and nobody has been told its handle.
	Creating State = "creating"
	// Ready: it exists.
	Ready State = "ready"
	// Deleting: its data may have gone already. To everybody else it does not exist.
	Deleting State = "deleting"
)

// Volume is one volume. What CreateVolume was asked for is here so that asking again can be compared.
type Volume struct {
	ID    handle.Volume `json:"id"`
	Name  string        `json:"name"`
	State State         `json:"state"`
	// Size in bytes, as CSI's capacity_bytes.
	Size int64 `json:"size"`
	// Expanding is the size in bytes that an expansion under way will end with, else 0.
	Expanding int64 `json:"expanding,omitempty"`
	// FSType is the filesystem of mounts, empty if the volume cannot be mounted.
	FSType string `json:"fsType,omitempty"`
	// Block says that the volume can be published as a block device.
	Block bool `json:"block,omitempty"`
	// Parameters are those of CreateVolume that are this driver's own.
	Parameters map[string]string `json:"parameters,omitempty"`
	// Mutable are the parameters that ControllerModifyVolume can change.
	Mutable map[string]string `json:"mutable,omitempty"`
	// Source is the handle of what the volume was made from, empty if it was made empty.
	Source  string    `json:"source,omitempty"`
	Created time.Time `json:"created"`
}

func (v Volume) key() string  { return v.ID.String() }
func (v Volume) name() string { return v.Name }
