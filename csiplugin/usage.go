package csiplugin

import (
	"fmt"
	"path/filepath"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
)

// where is what a volume is at a path.
type where struct {
	// publish at the path, or nil if the path is the staging path.
	publish *catalog.Publish
	// mounted says that the volume's filesystem is mounted at the path on the host.
	mounted bool
}

// locate finds out what a volume is at a path where it was staged or published. ErrNotFound if it was not;
// ErrFailedPrecondition if it is there in another way than the caller says with defer_fs_ops.
func (n *node) locate(v catalog.Volume, state catalog.Node, path string, deferFSOps bool) (where, error) {
	path = filepath.Clean(path)
	p, published := state.Publishes[path]
	staged := state.Staged != nil && state.Staged.Path == path
	switch {
	case !published && !staged:
		return where{}, fmt.Errorf("volume %s is neither staged nor published at %.512q: %w", v.ID, path, errdefs.ErrNotFound)
	case published && p.Kind == catalog.Deferred && !deferFSOps:
		return where{}, precondition("volume %s is published at %s to a sandbox; only that knows its filesystem", v.ID, path)
	case published && p.Kind != catalog.Deferred && deferFSOps:
		return where{}, precondition("volume %s is published at %s on the host; ask without defer_fs_ops", v.ID, path)
	}
	w := where{mounted: published && p.Kind == catalog.Mount}
	if published {
		w.publish = &p
		return w, nil
	}
	ours, err := n.ours(v)
	if err != nil {
		return w, err
	}
	m, err := hostmount.At(path)
	w.mounted = m != nil && ours(m)
	return w, err
}
