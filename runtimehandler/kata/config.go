package kata

import (
	"cmp"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
	"crust.dev/crust/runtimehandler/kata/cri"
)

// Name is the name of the handler unless the configuration gives it another one.
const Name = "kata"

const (
	// defaultProof is how long a runtime has for proving that a container's volume is in its sandbox. Kata gives its agent
	// 60 s for creating a container.
	defaultProof = 2 * time.Minute
	// defaultCall bounds a question to a sandbox. Kata's own tools wait for 2 to 3 s.
	defaultCall = 10 * time.Second
	// defaultAssist bounds the work on the host before a volume is handed over; the kubelet waits for 2 min.
	defaultAssist = 90 * time.Second
)

// Config is how a handler works. The zero value is a handler for both runtimes that does nothing on the host.
type Config struct {
	// Name is what the handler is called; Name if empty. A node may have several, say one for each runtime.
	Name string
	// Runtime says that only sandboxes of this runtime get the handler's volumes, which its RuntimeClasses have to see to;
	// empty: of either. The Go runtime applies fsGroup in the guest, so that no host assistance is needed for it.
	Runtime config.Runtime
	// Root is where the node's filesystem is seen, absolute; "/" if empty. Paths in records are the node's.
	Root string
	// CRIEndpoint is the container runtime's socket ("unix:///run/containerd/containerd.sock"); empty: sandboxes are found
	// by Kata's own traces and by the OCI bundles of containerd and CRI-O alone.
	CRIEndpoint string
	// FSTypes are the filesystems that the guest's kernel has; ext4 and xfs if empty, as Kata's own kernels have.
	FSTypes []string
	// HostAssist are the steps that crustd may do on the host because Kata's agent cannot.
	HostAssist []assist.Step
	// Assistant is the command that becomes the assisting process (see package assist); this program itself if empty.
	Assistant []string
	// AssistTimeout bounds that process; 90 s if zero.
	AssistTimeout time.Duration
	// ProofTimeout is how long after the creation of a container its volume may be unproven before the deferral counts as
	// breached; 2 min if zero.
	ProofTimeout time.Duration
	// CallTimeout bounds each question to a sandbox or to the container runtime; 10 s if zero.
	CallTimeout time.Duration
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// New checks a configuration. It does no I/O.
func New(c Config) (*Handler, error) {
	c.Name = cmp.Or(c.Name, Name)
	c.Root = cmp.Or(c.Root, "/")
	c.ProofTimeout = cmp.Or(c.ProofTimeout, defaultProof)
	c.CallTimeout = cmp.Or(c.CallTimeout, defaultCall)
	c.AssistTimeout = cmp.Or(c.AssistTimeout, defaultAssist)
	if len(c.FSTypes) == 0 {
		c.FSTypes = []string{"ext4", "xfs"}
	}
	invalid := func(format string, args ...any) (*Handler, error) {
		return nil, fmt.Errorf("handler %s: "+format+": %w", append(append([]any{c.Name}, args...), errdefs.ErrInvalidArgument)...)
	}
	switch {
	case !dnsLabel.MatchString(c.Name):
		return invalid("the name is not a DNS label")
	case !filepath.IsAbs(c.Root):
		return invalid("root %q is not absolute", c.Root)
	case !slices.Contains([]config.Runtime{"", config.Go, config.Rust}, c.Runtime):
		return invalid("runtime %q: want %s, %s or nothing", c.Runtime, config.Go, config.Rust)
	case c.ProofTimeout < 0 || c.CallTimeout < 0 || c.AssistTimeout < 0:
		return invalid("a time limit is negative")
	}
	for _, step := range c.HostAssist {
		if !slices.Contains(assist.Steps(), step) {
			return invalid("hostAssist %q: want some of %v", step, assist.Steps())
		}
	}
	h := &Handler{config: c, paths: pathsBelow(c.Root), own: map[string]bool{}}
	h.paths.scratch += "-" + c.Name
	h.bundles = newBundles(h.paths.bundles)
	if c.CRIEndpoint != "" {
		client, err := cri.New(c.CRIEndpoint)
		if err != nil {
			return nil, fmt.Errorf("handler %s: %w", c.Name, err)
		}
		h.cri = client
	}
	return h, nil
}

// may says whether a step on the host is allowed.
func (h *Handler) may(step assist.Step) bool { return slices.Contains(h.config.HostAssist, step) }

// Capabilities are what the agent of every Kata sandbox can do, which is little, and what the host may do in its place.
// Expansion is never promised: it works at the next sandbox start, or at once if the sandbox turns out to be able to.
func (h *Handler) Capabilities() runtimehandler.Capabilities {
	return runtimehandler.Capabilities{
		Format: h.may(assist.Format),
		Check:  h.may(assist.Check),
		Grow:   h.may(assist.Grow),
		Group:  h.config.Runtime == config.Go || h.may(assist.Chown),
	}
}
