package journal

import (
	"slices"
	"time"

	"crust.dev/crust/crust/internal/process"
	"crust.dev/crust/runtimehandler"
)

// State says which step of its life a deferral is in.
type State string

const (
	// Publishing: the SP may have been asked to publish; nobody may use the device yet.
	Publishing State = "publishing"
	// Published: sandboxes may use the device.
	Published State = "published"
	// Unpublishing: no sandbox may use the device any more; the SP may have been asked to unpublish.
	Unpublishing State = "unpublishing"
)

// Record is everything that crustd knows of one deferral. Its key is Deferral.TargetPath. Records are values: to change
// one, put a changed copy.
type Record struct {
	State State `json:"state"`
	// Host says that this is no deferral, but a volume that the driver has mounted on the host: of it only the identity is
	// known, and whether it is read-only. It is kept so that one volume is never used in both ways at once.
	Host bool `json:"host,omitempty"`
	// Request is a digest of the request that made the record, to tell a repetition from a contradiction.
	Request string `json:"request"`
	// Handler is the name of the runtimehandler.Handler whose runtime mounts the volume.
	Handler string `json:"handler"`
	// Deferral is what a sandbox has to mount. While Publishing only its identity is known.
	Deferral runtimehandler.Deferral `json:"deferral"`
	// Pod is the pod that the volume is for, as far as it is known.
	Pod Pod `json:"pod,omitzero"`
	// ResolvedTarget is the target path with symbolic links resolved, as a runtime may name it.
	ResolvedTarget string `json:"resolvedTarget,omitempty"`
	// Created is when the record was made.
	Created time.Time `json:"created"`
	// Claimed says that some sandbox has once been told to mount the volume, and may have begun to format it.
	Claimed bool `json:"claimed,omitempty"`
	// Mounted says that some sandbox has once reported it mounted. From then on it may hold data.
	Mounted bool `json:"mounted,omitempty"`
	// Expanding is the size in bytes to which the filesystem in the sandbox has still to grow; 0 if none.
	Expanding int64 `json:"expanding,omitempty"`
	// Binding is the sandbox that holds the volume now.
	Binding *Binding `json:"binding,omitempty"`
}

// Pod names a pod.
type Pod struct {
	UID       string `json:"uid,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
}

// Binding ties a deferral to a sandbox.
type Binding struct {
	Sandbox runtimehandler.Sandbox `json:"sandbox"`
	// Processes are those that hold the sandbox's devices open, its shim among them. It lives as long as one of them. There
	// are none if the handler found the sandbox by itself; then it knows whether that lives.
	Processes []process.Identity `json:"processes,omitempty"`
	// Mounted says that the filesystem is mounted in the sandbox.
	Mounted bool `json:"mounted,omitempty"`
	// Breach says why the sandbox runs without the volume; empty: it does not, as far as is known.
	Breach string `json:"breach,omitempty"`
	// Since is when the sandbox claimed the volume.
	Since time.Time `json:"since"`
}

// Phase says in one word where a deferral is, for people and metrics: its state, or for a published one what the sandbox
// has made of it.
func (r Record) Phase() string {
	switch {
	case r.Host:
		return "host"
	case r.State != Published || r.Binding == nil:
		return string(r.State)
	case r.Binding.Mounted:
		return "mounted"
	case r.Binding.Breach != "":
		return "breached"
	default:
		return "claimed"
	}
}

// clone returns a copy that shares nothing that anybody changes.
func (r Record) clone() Record {
	r.Deferral.MountFlags = slices.Clone(r.Deferral.MountFlags)
	if r.Deferral.Group != nil {
		group := *r.Deferral.Group
		r.Deferral.Group = &group
	}
	if r.Binding != nil {
		binding := *r.Binding
		binding.Processes = slices.Clone(binding.Processes)
		r.Binding = &binding
	}
	return r
}
