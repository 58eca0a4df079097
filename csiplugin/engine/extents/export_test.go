package extents

import (
	"context"
	"os"

	"crust.dev/crust/csiplugin/engine"
)

// Extent is an extent as the kernel describes it, for [Differences].
type Extent struct {
	Logical, Physical, Length uint64
	Flags                     uint32
}

// Differences compares two maps of size bytes.
func Differences(base, target []Extent, size int64) (found []engine.Range) {
	windows := [2]window{}
	for i, list := range [][]Extent{base, target} {
		for _, x := range list {
			windows[i].add(extent{Logical: x.Logical, Physical: x.Physical, Length: x.Length, Flags: x.Flags}, 0, size)
		}
	}
	out := joiner{emit: func(r engine.Range) error { found = append(found, r); return nil }}
	_ = differences(windows[0].pieces, windows[1].pieces, 0, size, out.add)
	_ = out.flush()
	return found
}

// CompareWith is Compare with a function that is called between the looks at base and at target.
func CompareWith(ctx context.Context, base, target *os.File, between func(), emit func(engine.Range) error) error {
	c, err := newComparison(base, target)
	if err != nil {
		return err
	}
	c.between = between
	return c.run(ctx, 0, emit)
}

// PerWindow is how many extents are looked at together.
const PerWindow = perCall
