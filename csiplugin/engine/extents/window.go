package extents

import (
	"context"
	"fmt"
	"os"
)

// piece is a part of a file that may hold data: [start, end), from the place at on. What is between pieces reads as zero.
type piece struct {
	start, end int64
	at         uint64
	// doubtful says that at means nothing.
	doubtful bool
}

// follows says whether p goes on where q ends, in the file and on the filesystem, so that both are one piece.
func (p piece) follows(q piece) bool {
	return p.start == q.end && p.doubtful == q.doubtful && (p.doubtful || p.at == q.at+uint64(q.end-q.start))
}

// sameAs says whether two pieces of different files surely have the same byte at an offset that is in both.
func (p piece) sameAs(q piece, offset int64) bool {
	return !p.doubtful && !q.doubtful && p.at+uint64(offset-p.start) == q.at+uint64(offset-q.start)
}

// window is a part of a file's map: all pieces in [from, reach).
type window struct {
	pieces      []piece
	from, reach int64
}

// perWindow is how many pieces are enough for a window. It has fewer than that, and those of one more system call.
const perWindow = perCall / 2

// file is one whose map is read window by window. It owns the memory for one window, and one system call.
type file struct {
	*os.File
	size int64
	raw  fiemap
	win  window
}

func newFile(f *os.File) (*file, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", f.Name())
	}
	return &file{File: f, size: info.Size(), win: window{pieces: make([]piece, 0, perWindow+perCall)}}, nil
}

// look reads the map from an offset on, as far as to or as far as a window goes. What is beyond the file's end is a hole.
// The window is good until the next look. Wherever the kernel cuts extents, the same map gives the same pieces.
func (f *file) look(ctx context.Context, from, to int64) (*window, error) {
	w := &f.win
	w.pieces, w.from, w.reach = w.pieces[:0], from, to
	end := min(to, f.size)
	err := f.raw.each(ctx, f.File, from, end, func(found []extent, known int64) bool {
		for _, x := range found {
			w.add(x, from, end)
		}
		if len(w.pieces) < perWindow || known >= end {
			return true
		}
		w.reach = known
		return false
	})
	return w, err
}

// add adds an extent to a window, as far as it is in [from, to).
func (w *window) add(x extent, from, to int64) {
	p := piece{start: int64(x.Logical), end: int64(x.Logical + x.Length), at: x.Physical, doubtful: x.Flags&^harmless != 0}
	if n := len(w.pieces); n > 0 {
		from = max(from, w.pieces[n-1].end)
	}
	if p.start < from {
		p.at += uint64(from - p.start)
		p.start = from
	}
	p.end = min(p.end, to)
	if p.start >= p.end || !p.doubtful && x.Flags&extentUnwritten != 0 {
		return
	}
	if n := len(w.pieces); n > 0 && p.follows(w.pieces[n-1]) {
		w.pieces[n-1].end = p.end
		return
	}
	w.pieces = append(w.pieces, p)
}

// cut makes a window end at an offset that it reaches.
func (w *window) cut(reach int64) {
	w.reach = reach
	for n := len(w.pieces); n > 0; n-- {
		last := &w.pieces[n-1]
		if last.start < reach {
			last.end = min(last.end, reach)
			return
		}
		w.pieces = w.pieces[:n-1]
	}
}
