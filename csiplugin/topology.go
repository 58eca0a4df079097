package csiplugin

import (
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// topology says where the pool's volumes can be used: wherever the pool is. The pool and not the node is the segment, so
// that volumes follow a pool whose disk is moved to another node.
func (s *store) topology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{s.topologyKey: string(s.pool)}}
}

func (s *store) isHere(t *csi.Topology) bool {
	return maps.Equal(t.GetSegments(), s.topology().GetSegments())
}

// reachable returns nil if a volume of this pool meets accessibility_requirements, and otherwise an error without a kind.
// Preferences are that only, if there is nothing else to choose.
func (s *store) reachable(r *csi.TopologyRequirement) error {
	if len(r.GetRequisite()) == 0 || slices.ContainsFunc(r.GetRequisite(), s.isHere) {
		return nil
	}
	return fmt.Errorf("accessibility_requirements: none of the %d requisite topologies is %s=%s", len(r.GetRequisite()), s.topologyKey, s.pool)
}
