package engine

import "context"

// Range is some bytes of an object: Length of them, more than 0, from Offset on.
type Range struct{ Offset, Length int64 }

// End is the offset of the first byte after the range.
func (r Range) End() int64 { return r.Offset + r.Length }

// Changes is what an engine has beside [Engine] if it can tell where objects differ without reading them.
//
// Both maps are for objects that nobody writes to: snapshots, which Seal protects. Ranges come in order, never overlap and
// never adjoin, and lie within the object. They begin at from, or later, or at most where the 4096 bytes begin that from is
// in. If emit returns an error the call ends with it. A call that ends without an error has emitted everything; the ranges
// of one that ends with an error are right, but not all. Memory does not grow with the number of ranges.
type Changes interface {
	// Seal protects an object from being written to, renamed and removed by anybody, this machine's root included, until
	// Delete; and its blocks, as far as the storage can do that, from being moved. It is success if that was done before.
	// Where the process lacks the right to do it, it is ErrPermissionDenied.
	Seal(ctx context.Context, name Name) error

	// Data emits the ranges of an object that may hold data. All others read as zero.
	Data(ctx context.Context, name Name, from int64, emit func(Range) error) error

	// Changed emits the ranges in which target may differ from base, where what base is too short for counts as zero. All
	// others are the same, byte by byte. Where the storage cannot compare the two it is ErrFailedPrecondition.
	Changed(ctx context.Context, base, target Name, from int64, emit func(Range) error) error
}
