package filesystem

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
)

// Grounds are what the caller knows, as opposed to guesses, about the content of a device.
type Grounds int

const (
	// NothingKnown: what is not recognised counts as data.
	NothingKnown Grounds = iota
	// NeverWritten: the storage says that no byte was ever written.
	NeverWritten
	// UnfinishedFormat: it was never written when it was published, and no sandbox has had it in use since. At most an
	// interrupted mkfs of the wanted type has written to it.
	UnfinishedFormat
)

// Wish is what the caller wants of a device.
type Wish struct {
	Type     string
	ReadOnly bool // change nothing on the device
	Grounds  Grounds
}

// Making says whether a filesystem is made.
type Making int

const (
	// MakeNone makes none.
	MakeNone Making = iota
	// MakeFresh makes one on a device that reads as zeros.
	MakeFresh
	// MakeOver makes one over what an interrupted mkfs has left.
	MakeOver
	// MakeUnlessSound does the same unless a full check finds a whole filesystem.
	MakeUnlessSound
)

// Decision is what is to be done with a device before it is mounted.
type Decision struct {
	Make  Making
	Check bool // check and repair what the tool repairs without asking
}

// Decide says what is to be done so that a device can be mounted as the wish has it. ErrFailedPrecondition if nothing may
// be done: the text names what was found and the cure. ErrOutOfRange if the device is too small for the filesystem;
// ErrInvalidArgument for an unknown type.
func Decide(f Finding, w Wish) (Decision, error) {
	k, err := kindOf(w.Type)
	if err != nil {
		return Decision{}, err
	}
	switch {
	case f.Ambivalent:
		return Decision{}, refusal("signatures of more than one kind")
	case f.Table != "" && f.Type != "":
		return Decision{}, refusal(fmt.Sprintf("both %s and a partition table (%s)", describe(f.Type, f.Usage), f.Table))
	case f.Table != "":
		return Decision{}, refusal(fmt.Sprintf("a partition table (%s)", f.Table))
	case f.Type == w.Type:
		return decideWanted(f, w)
	case f.Type != "" && w.Grounds == UnfinishedFormat && !w.ReadOnly && slices.Contains(k.traces, f.Type):
		return k.decideMake(f, MakeOver)
	case f.Type != "":
		return Decision{}, refusal(describe(f.Type, f.Usage))
	}
	return decideUnrecognised(f, w, k)
}

// decideWanted is for a device with the wanted filesystem: it is never made again, but for one that was never finished.
func decideWanted(f Finding, w Wish) (Decision, error) {
	switch {
	case w.ReadOnly && f.Journal:
		return Decision{}, fmt.Errorf("the %s filesystem was not unmounted cleanly and its journal cannot be replayed on a device that is read-only; publish the volume read-write once: %w",
			f.Type, errdefs.ErrFailedPrecondition)
	case w.ReadOnly:
		return Decision{}, nil
	case w.Grounds == UnfinishedFormat:
		return Decision{Make: MakeUnlessSound}, nil
	}
	return Decision{Check: true}, nil
}

// decideUnrecognised is for a device on which nothing was recognised, which is not to say that nothing is there.
func decideUnrecognised(f Finding, w Wish, k kind) (Decision, error) {
	seen := "nothing but zeros where it was looked"
	if f.NonZero >= 0 {
		seen = fmt.Sprintf("a byte that is not zero at offset %d", f.NonZero)
	}
	const cure = "if it has no data, replace it by a new volume, or make the filesystem by hand"
	switch {
	case w.ReadOnly:
		return Decision{}, fmt.Errorf("the device has no filesystem that is recognised (%s), and none is made on a read-only volume; publish it read-write once: %w",
			seen, errdefs.ErrFailedPrecondition)
	case w.Grounds == UnfinishedFormat:
		return k.decideMake(f, MakeOver)
	case w.Grounds == NeverWritten && f.NonZero < 0:
		return k.decideMake(f, MakeFresh)
	case w.Grounds == NeverWritten:
		return Decision{}, fmt.Errorf("the storage says that the device was never written, but it has %s; it is not formatted; %s: %w",
			seen, cure, errdefs.ErrFailedPrecondition)
	}
	return Decision{}, fmt.Errorf("the device has no filesystem that is recognised (%s), and it is not known to be blank; it is not formatted, because it may have data; %s: %w",
		seen, cure, errdefs.ErrFailedPrecondition)
}

// decideMake decides to make a filesystem, if the device is large enough.
func (k kind) decideMake(f Finding, how Making) (Decision, error) {
	if f.Bytes < k.minBytes {
		return Decision{}, fmt.Errorf("the device has %d bytes, and %s needs %d at least (%s); ask for a larger volume: %w",
			f.Bytes, k.name, k.minBytes, k.minWhy, errdefs.ErrOutOfRange)
	}
	return Decision{Make: how}, nil
}

func refusal(found string) error {
	return fmt.Errorf("the device has %s; nothing is formatted over that; if it is what you want to use, ask for its type, and if it is not needed, replace the volume by a new one: %w",
		found, errdefs.ErrFailedPrecondition)
}

// describe names what libblkid has recognised so that a person understands it.
func describe(fsType, usage string) string {
	switch fsType {
	case "crypto_LUKS":
		return "a LUKS container"
	case "LVM2_member", "LVM1_member":
		return "an LVM physical volume"
	case "linux_raid_member":
		return "a member of a RAID array"
	case "swap":
		return "swap space"
	}
	switch usage {
	case "filesystem":
		return "a filesystem (" + fsType + ")"
	case "raid":
		return "a member of a volume group or array (" + fsType + ")"
	case "crypto":
		return "an encrypted container (" + fsType + ")"
	}
	return "something else (" + fsType + ")"
}
