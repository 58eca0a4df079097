package pool

import "path/filepath"

// Images is the directory for backing images that are in the making, and for the files of exports. It is on the filesystem of
// [Pool.Objects], and need not be there.
func (p *Pool) Images() string { return filepath.Join(p.root, "images") }
