package engine

import (
	"context"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// Name names an object within an engine: 1 to 128 lower-case letters, digits and hyphens, beginning with a letter or a
// digit. It is a file name, a logical volume's name and an RBD image's name at once.
type Name string

// ParseName checks a name. Errors are ErrInvalidArgument.
func ParseName(s string) (Name, error) {
	if s == "" || len(s) > 128 || s[0] == '-' || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
		return "", fmt.Errorf("object name %.130q: want 1 to 128 of a-z, 0-9 and hyphens, not beginning with a hyphen: %w", s, errdefs.ErrInvalidArgument)
	}
	return Name(s), nil
}

// Stat is what an engine knows of an object.
type Stat struct {
	// Size in bytes.
	Size int64
	// Allocated is how many bytes of the pool the object takes. What it shares with other objects counts for each.
	Allocated int64
	// NeverWritten is true only if the engine knows that every byte of the object reads as zero because nothing was ever
	// written to it, or all that was has been discarded. It is knowledge of the allocation, not a look at the data, and
	// it is what formatting rests on. It is only meaningful while nobody has the object open ([Engine.Idle]): data on its
	// way in a user's cache is not seen.
	NeverWritten bool
}

// MaxLabel is how many bytes a label may have.
const MaxLabel = 3 << 10

// Extents is how an object lies in the pool.
type Extents struct {
	// Count is the number of pieces. Cloning takes a time in proportion to it.
	Count int64
	// Allocated and Shared are bytes that the object takes, and those of them that it shares with others: what deleting it
	// gives back is the difference.
	Allocated, Shared int64
}

// Capacity is the state of the storage that objects take their space from, in bytes.
type Capacity struct {
	// Total is what all objects together can ever hold, and thus the largest object.
	Total int64
	// Free is what can still be allocated.
	Free int64
}

// Engine keeps the data of objects. Objects are thin: space is taken when it is written to.
//
// All methods may be called at any time from any goroutine, but for one object only one of Create, Grow, Erase and Delete
// at a time, and none of these while it is either end of a Clone; the caller sees to that. What a method has done is durable when it returns. A process that dies in a method
// leaves the object as it was before or as it is afterwards. A full pool is ErrResourceExhausted and changes nothing.
// Methods that take a name of no object return ErrNotFound unless they say otherwise.
type Engine interface {
	// Create makes an object of size bytes, a positive multiple of 4096, that has never been written. It is success if the
	// object is there already, has this size and has never been written; any other object of this name is
	// ErrAlreadyExists. A size that the pool cannot represent is ErrOutOfRange. See [Engine.SetLabel] for the label.
	Create(ctx context.Context, name Name, size int64, label []byte) error

	// Clone makes an object of size bytes that begins with what another one held at one moment during the call, whoever
	// writes to that meanwhile: what was written before the call is in it, and of two writes of which the second began
	// when the first had ended, it never has only the second. The rest reads as zero. No data is copied; both share their
	// blocks until they are overwritten, and neither depends on the other. An object of the new name is ErrAlreadyExists,
	// a size below that of the other object is ErrOutOfRange.
	//
	// It takes a time that grows with the number of pieces the source lies in, which may be minutes. Writers of the source
	// wait meanwhile. It cannot be interrupted: ctx is looked at before and afterwards.
	Clone(ctx context.Context, from, to Name, size int64, label []byte) error

	// Grow makes an object larger; the new bytes read as zero and are not allocated. It may be in use meanwhile. It is
	// success if the object has at least this size already, and never shrinks one.
	Grow(ctx context.Context, name Name, size int64) error

	// Erase discards all data of an object and keeps its size; it has never been written afterwards. While anybody has the
	// object open it is ErrFailedPrecondition and changes nothing, and nobody can open it while its data goes.
	Erase(ctx context.Context, name Name) error

	// Delete removes an object and its data. While anybody has it open it is ErrFailedPrecondition and changes nothing. It
	// is success if there is no such object.
	Delete(ctx context.Context, name Name) error

	// Idle returns nil if nobody has the object open, and ErrFailedPrecondition otherwise, with as much as can be found
	// out about who it is. Loop devices count.
	Idle(ctx context.Context, name Name) error

	// SetLabel replaces an object's label: at most [MaxLabel] bytes that are kept with the data, whatever becomes of the
	// catalog, and mean nothing to the engine.
	SetLabel(ctx context.Context, name Name, label []byte) error

	// Label returns an object's label, nil if it never had one.
	Label(ctx context.Context, name Name) ([]byte, error)

	// Names returns the names of all objects, in order.
	Names(ctx context.Context) ([]Name, error)

	// Extents reports how an object lies in the pool. It takes a time that grows with the number of pieces.
	Extents(ctx context.Context, name Name) (Extents, error)

	// Stat reports what is known of an object.
	Stat(ctx context.Context, name Name) (Stat, error)

	// Path returns the absolute path of the block device or image file through which an object is read and written. It
	// does not look whether there is such an object.
	Path(name Name) string

	// Capacity reports the state of the pool.
	Capacity(ctx context.Context) (Capacity, error)
}
