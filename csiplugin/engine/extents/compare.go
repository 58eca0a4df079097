package extents

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/internal/fileattr"
)

// Data emits the ranges of a file that may hold data, from an offset on, in order and joined where they adjoin.
func Data(ctx context.Context, f *os.File, from int64, emit func(engine.Range) error) error {
	m, err := newFile(f)
	if err != nil {
		return err
	}
	out := joiner{emit: emit}
	for from < m.size {
		w, err := m.look(ctx, from, m.size)
		if err != nil {
			return err
		}
		for _, p := range w.pieces {
			if err := out.add(p.start, p.end); err != nil {
				return err
			}
		}
		from = w.reach
	}
	return out.flush()
}

// Compare emits the ranges in which target may differ from base, from an offset on and as far as target goes, in order and
// joined where they adjoin; see the package's documentation for when that is all of them. What base is too short for counts
// as zero. Files of two filesystems are ErrFailedPrecondition.
func Compare(ctx context.Context, base, target *os.File, from int64, emit func(engine.Range) error) error {
	c, err := newComparison(base, target)
	if err != nil {
		return err
	}
	return c.run(ctx, from, emit)
}

type comparison struct {
	base, target *file
	// still says that both files have been such, all the while, as the filesystem cannot move.
	still bool
	// again is the window of base that was compared last.
	again []piece
	// between is called between the looks at the two maps: for tests.
	between func()
}

func newComparison(base, target *os.File) (*comparison, error) {
	var b, t unix.Stat_t
	var fs unix.Statfs_t
	for _, err := range []error{unix.Fstat(int(base.Fd()), &b), unix.Fstat(int(target.Fd()), &t), unix.Fstatfs(int(base.Fd()), &fs)} {
		if err != nil {
			return nil, err
		}
	}
	baseAttr, err := fileattr.Get(base)
	if err != nil {
		return nil, err
	}
	targetAttr, err := fileattr.Get(target)
	if err != nil {
		return nil, err
	}
	both, either := baseAttr.Flags&targetAttr.Flags, baseAttr.Flags|targetAttr.Flags
	if b.Dev != t.Dev || (both^either)&fileattr.Realtime != 0 {
		return nil, fmt.Errorf("%s and %s are on two filesystems, or two devices of one, and cannot be compared by their extents: %w",
			base.Name(), target.Name(), errdefs.ErrFailedPrecondition)
	}
	c := &comparison{
		still:   fs.Type == unix.XFS_SUPER_MAGIC && both&fileattr.Immutable != 0 && either&fileattr.Realtime == 0,
		between: func() {},
	}
	if c.base, err = newFile(base); err != nil {
		return nil, err
	}
	c.target, err = newFile(target)
	return c, err
}

func (c *comparison) run(ctx context.Context, from int64, emit func(engine.Range) error) (err error) {
	out := joiner{emit: emit}
	for from < c.target.size {
		if from, err = c.step(ctx, from, out.add); err != nil {
			return err
		}
	}
	return out.flush()
}

// tries is how often a part of the maps is read in the hope that it does not move meanwhile.
const tries = 5

// giveUp is how many bytes are reported as changed if it did.
const giveUp = 8 << 20

// step compares the maps from an offset on, and returns how far it came.
func (c *comparison) step(ctx context.Context, from int64, emit func(start, end int64) error) (int64, error) {
	for range tries {
		b, err := c.base.look(ctx, from, c.target.size)
		if err != nil {
			return 0, err
		}
		c.between()
		t, err := c.target.look(ctx, from, b.reach)
		if err != nil {
			return 0, err
		}
		b.cut(t.reach)
		same, err := c.unmoved(ctx, b)
		if err != nil {
			return 0, err
		}
		if same {
			return t.reach, differences(c.again, t.pieces, from, t.reach, emit)
		}
	}
	end := min(from+giveUp, c.target.size)
	return end, emit(from, end)
}

// unmoved keeps a window of base in c.again, and says whether base's blocks were where it says while target was looked at.
func (c *comparison) unmoved(ctx context.Context, b *window) (bool, error) {
	c.again = append(c.again[:0], b.pieces...)
	for _, f := range []*file{c.base, c.target} {
		if c.still {
			attr, err := fileattr.Get(f.File)
			if err != nil {
				return false, err
			}
			c.still = attr.Flags&fileattr.Immutable != 0
		}
	}
	if c.still {
		return true, nil
	}
	from, reach := b.from, b.reach
	b, err := c.base.look(ctx, from, reach)
	if err != nil {
		return false, err
	}
	return b.reach == reach && slices.Equal(b.pieces, c.again), nil
}

// differences calls emit with the parts of [from, to) in which two lists of pieces do not surely have the same bytes.
func differences(base, target []piece, from, to int64, emit func(start, end int64) error) error {
	for from < to {
		for len(base) > 0 && base[0].end <= from {
			base = base[1:]
		}
		for len(target) > 0 && target[0].end <= from {
			target = target[1:]
		}
		next := min(boundary(base, from, to), boundary(target, from, to))
		inBase := len(base) > 0 && base[0].start <= from
		inTarget := len(target) > 0 && target[0].start <= from
		if (inBase || inTarget) && !(inBase && inTarget && base[0].sameAs(target[0], from)) {
			if err := emit(from, next); err != nil {
				return err
			}
		}
		from = next
	}
	return nil
}

// boundary is where the first of the pieces that end after from begins or ends, or to.
func boundary(pieces []piece, from, to int64) int64 {
	switch {
	case len(pieces) == 0:
		return to
	case pieces[0].start > from:
		return min(pieces[0].start, to)
	}
	return min(pieces[0].end, to)
}

// joiner joins ranges that adjoin.
type joiner struct {
	emit       func(engine.Range) error
	start, end int64
}

func (j *joiner) add(start, end int64) error {
	if start == j.end && j.end > j.start {
		j.end = end
		return nil
	}
	err := j.flush()
	j.start, j.end = start, end
	return err
}

func (j *joiner) flush() error {
	if j.end == j.start {
		return nil
	}
	r := engine.Range{Offset: j.start, Length: j.end - j.start}
	j.start = j.end
	return j.emit(r)
}
