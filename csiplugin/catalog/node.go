package catalog

import "crust.dev/crust/csiplugin/handle"

// Node is what this node does with one volume. The zero value is: nothing.
type Node struct {
	Staged *Stage `json:"staged,omitempty"`
	// Publishes by target path.
	Publishes map[string]Publish `json:"publishes,omitempty"`
	// Formatting says that a filesystem is being made on the host and was never mounted since: whatever the volume holds is
	// a fragment of that filesystem and nobody's data.
	Formatting bool `json:"formatting,omitempty"`
}

// Stage is a NodeStageVolume that was answered with success. It is a record and no more: nothing is mounted by it.
type Stage struct {
	Path string `json:"path"`
	Use  Use    `json:"use"`
	// Boot is the boot id of the kernel under which it was recorded.
	Boot string `json:"boot"`
}

// Use is what a volume_capability asks for, in a form that can be compared.
type Use struct {
	// Block device, or else a mount of FSType.
	Block  bool   `json:"block,omitempty"`
	FSType string `json:"fsType,omitempty"`
	// Mode is the number of CSI's access mode.
	Mode int32 `json:"mode"`
	// Flags is a digest of the mount flags, which may be confidential; empty without flags.
	Flags string `json:"flags,omitempty"`
}

// Kind is how a volume is published.
type Kind string

// Kinds of publishes.
const (
	// Deferred: a sandbox gets the volume's file; nothing is mounted.
	Deferred Kind = "deferred"
	// Mount: the filesystem is mounted at the staging path and bound to the target.
	Mount Kind = "mount"
	// Block: a loop device is bound to the target.
	Block Kind = "block"
)

// States of a publish.
const (
	// Publishing: it is being set up and nobody has been told; an interrupted one is undone.
	Publishing State = "publishing"
	// Published: it is in effect, unless the machine has been rebooted since.
	Published State = "published"
	// Unpublishing: it is being taken down; an interrupted one is carried on.
	Unpublishing State = "unpublishing"
)

// Publish is one NodePublishVolume.
type Publish struct {
	Target   string `json:"target"`
	Staging  string `json:"staging"`
	Kind     Kind   `json:"kind"`
	State    State  `json:"state"`
	Use      Use    `json:"use"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// Group is the numeric id of the group that is to have access, and Policy when to change what is there.
	Group  string `json:"group,omitempty"`
	Policy string `json:"policy,omitempty"`
	// Discard says that the filesystem is mounted so that it discards what it frees, by the volume's policy.
	Discard bool `json:"discard,omitempty"`
	// NeverWritten, of a deferred publish: the volume was blank when it was first published here, so that whatever it holds
	// now was written by this publish's sandbox.
	NeverWritten bool `json:"neverWritten,omitempty"`
	// Erase, while Unpublishing: the volume is made blank again, because nobody ever mounted what the sandbox has written.
	Erase bool `json:"erase,omitempty"`
	// Boot is the boot id of the kernel under which it was last set up.
	Boot string `json:"boot"`
}

// Same reports whether p and q are answers to the same request for the same target.
func (p Publish) Same(q Publish) bool {
	return p.Target == q.Target && p.Staging == q.Staging && p.Kind == q.Kind && p.Use == q.Use &&
		p.ReadOnly == q.ReadOnly && p.Group == q.Group && p.Policy == q.Policy
}

// nodeRecord is a Node with its key, as it is stored.
type nodeRecord struct {
	ID   handle.Volume `json:"id"`
	Node Node          `json:"node"`
}
