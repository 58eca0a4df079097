package csiplugin

import (
	"encoding/json"
	"fmt"

	"crust.dev/crust/csiplugin/catalog"
)

// label is what is kept with the data of a volume or a snapshot, so that [Repair] can rebuild a catalog: the record as it is
// when the object is ready.
type label struct {
	Volume   *catalog.Volume   `json:"volume,omitempty"`
	Snapshot *catalog.Snapshot `json:"snapshot,omitempty"`
	Image    *catalog.Image    `json:"image,omitempty"`
	// Group is that of a snapshot that is one of a group.
	Group *catalog.Group `json:"group,omitempty"`
	// Base is the record of a snapshot that was deleted and is kept to be compared with.
	Base *catalog.Base `json:"base,omitempty"`
}

func (l label) encode() ([]byte, error) {
	text, err := json.Marshal(l)
	if err != nil {
		return nil, fmt.Errorf("label: %w", err)
	}
	return text, nil
}

func volumeLabel(v catalog.Volume) ([]byte, error) {
	v.State = catalog.Ready
	return label{Volume: &v}.encode()
}

// imageLabel is that of an image in the state that it has.
func imageLabel(i catalog.Image) ([]byte, error) { return label{Image: &i}.encode() }

func snapshotLabel(s catalog.Snapshot, g *catalog.Group) ([]byte, error) {
	s.State = catalog.Ready
	return label{Snapshot: &s, Group: g}.encode()
}
