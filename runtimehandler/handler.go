package runtimehandler

import (
	"context"
	"time"
)

// Handler hands deferrals to one kind of runtime and asks that runtime about them.
//
// Calls that change something never overlap for one target path; Status and Stats may overlap with everything, and
// calls for different target paths with each other. Every method may be repeated after any failure, or after the daemon
// was killed in the middle.
// Errors wrap these kinds of containerd/errdefs:
//
//   - ErrNotFound: the sandbox does not have the volume (any more).
//   - ErrUnavailable: the sandbox cannot be reached or has not answered in time; nothing is known.
//   - ErrNotImplemented: this kind of runtime can never do it.
//   - ErrFailedPrecondition: it cannot do it now; the text says what would have to change.
//   - ErrInvalidArgument: this runtime can never mount such a volume; the text says why.
type Handler interface {
	// Name is what the configuration calls this handler; a DNS label, constant.
	Name() string

	// Capabilities says what every sandbox of this kind can do. It does no I/O.
	Capabilities() Capabilities

	// Stage hands a deferral over before any sandbox knows of it. Staging the same deferral again succeeds and repairs
	// what may have been lost on the runtime's side, and does what a device that has grown since needs before its next
	// mount; another deferral at the same target path replaces it. When it fails, nothing of the deferral is left on the
	// runtime's side, unless it was staged before: then it still is.
	Stage(ctx context.Context, d Deferral) error

	// Unstage takes a deferral back. It succeeds if the deferral was never staged. The daemon calls it only when no
	// sandbox holds the device.
	Unstage(ctx context.Context, targetPath string) error

	// Sweep brings the runtime's side in line with the deferrals that are staged: it puts back what is missing, takes back
	// what this handler has once staged and is no longer in the list, and leaves alone what others have put there. It
	// returns what it has left and an operator should know of; anything else is an error. A deferral may be staged or
	// unstaged meanwhile.
	Sweep(ctx context.Context, staged []Deferral) ([]Leftover, error)

	// Roots are the directories in which a change means that a sandbox may have come or gone, or that something of this
	// handler's was removed. They need not exist (yet). Constant.
	Roots() []string

	// Status finds out where the volume is. sandbox is the one to which the daemon thinks it is bound, or nil.
	Status(ctx context.Context, targetPath string, sandbox *Sandbox) (Status, error)

	// Stats measures the filesystem from inside the sandbox.
	Stats(ctx context.Context, targetPath string, sandbox Sandbox) (Stats, error)

	// Expand makes the sandbox see the device's present size, which is requiredBytes at least, and grows the filesystem
	// to it. It returns the device's size in bytes as the sandbox sees it, only after the filesystem has grown. It
	// never shrinks anything. requiredBytes may be 0: whatever the device has.
	Expand(ctx context.Context, targetPath string, sandbox Sandbox, requiredBytes int64) (int64, error)

	// Freeze makes the filesystem consistent on its device and holds writes back until Thaw, or until limit has passed,
	// whoever has died meanwhile. Freezing twice is ErrFailedPrecondition.
	Freeze(ctx context.Context, targetPath string, sandbox Sandbox, limit time.Duration) error

	// Thaw ends a freeze. ErrFailedPrecondition if it had ended before.
	Thaw(ctx context.Context, targetPath string, sandbox Sandbox) error
}

// Capabilities is what a kind of runtime can do inside its sandboxes. What it cannot do, the host must not do in its
// place unless the operator has allowed it.
type Capabilities struct {
	Format       bool // make a filesystem on a device that is known to be blank
	Check        bool // check and repair before mounting
	Grow         bool // grow a filesystem when it is mounted
	OnlineExpand bool // grow a mounted filesystem
	Group        bool // give files to a supplemental group (fsGroup)
	SubPath      bool // show a sub-directory of a volume to a container
	Freeze       bool // freeze and thaw
}

// Blankness is what is known, as opposed to guessed, about a device's content. docs/adr/0001-blankness.md has the
// reasons.
type Blankness int

const (
	// BlanknessUnknown: nothing is known; whatever is not recognised counts as data.
	BlanknessUnknown Blankness = iota
	// BlanknessNeverWritten: the storage says that no byte was ever written.
	BlanknessNeverWritten
	// BlanknessUnfinishedFormat: it was never written when it was published, and no sandbox has reported it bound
	// since; at most an interrupted format has written to it.
	BlanknessUnfinishedFormat
)

// GroupChangePolicy says when files are given to the supplemental group.
type GroupChangePolicy int

const (
	// GroupChangeAlways: at every mount. It is the default of Kubernetes.
	GroupChangeAlways GroupChangePolicy = iota
	// GroupChangeOnRootMismatch: only if the root directory does not fit yet.
	GroupChangeOnRootMismatch
)

// Deferral is one published volume whose filesystem a sandbox has to mount.
type Deferral struct {
	Driver     string `json:"driver"`
	VolumeID   string `json:"volumeId"`
	TargetPath string `json:"targetPath"` // the CSI target path, as the CO gave it

	Device     string   `json:"device"` // block device or image file; absolute, symbolic links resolved
	Serial     string   `json:"serial"` // the virtio serial that the guest must look for; see [Serial]
	SizeBytes  int64    `json:"sizeBytes"`
	FSType     string   `json:"fsType"`
	MountFlags []string `json:"mountFlags,omitempty"`
	ReadOnly   bool     `json:"readOnly,omitempty"`

	Format    bool      `json:"format,omitempty"`    // the storage wants a blank device to be formatted
	Blankness Blankness `json:"blankness,omitempty"` // on what grounds that may be done

	Group             *uint32           `json:"group,omitempty"` // fsGroup
	GroupChangePolicy GroupChangePolicy `json:"groupChangePolicy,omitempty"`
}

// Sandbox is one running sandbox.
type Sandbox struct {
	ID      string `json:"id"`
	Runtime string `json:"runtime"` // the kind, as the sandbox's shim calls itself
	Address string `json:"address"` // how the handler reaches it; only the handler understands it
}

// Status says where a volume is.
type Status struct {
	// Sandbox is the one that holds the volume, or nil.
	Sandbox *Sandbox
	// Mounted says whether its filesystem is mounted there by now.
	Mounted bool
	// Breach, if not empty, says that the sandbox should have mounted the volume by now and has not: why, and what helps.
	// Its containers see the sealed target path, and can write nothing.
	Breach string
}

// Leftover is something on a runtime's side that Sweep has found and left.
type Leftover struct {
	Path string
	Text string // what it is and what to do about it
	// Stranger says that it belongs to somebody else.
	Stranger bool
}

// Stats is the fill level and the health of a filesystem. The meaning of the numbers is that of CSI's VolumeUsage and of
// Kubernetes: used counts what is not free, available what an unprivileged process may still take; the two need not
// add up to the total.
type Stats struct {
	Bytes, Inodes Usage
	Abnormal      bool
	Message       string // why it is abnormal, for a person
}

// Usage is a fill level in one unit.
type Usage struct {
	Total, Available, Used int64
}
