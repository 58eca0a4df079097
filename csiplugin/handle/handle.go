package handle

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

const (
	poolBytes   = 6
	randomBytes = 16
)

// Pool identifies one storage pool: twelve lower-case hexadecimal digits, drawn once when the pool is made. It is also
// the value of the topology segment that says where a volume can be used.
type Pool string

// NewPool draws the identity of a new pool.
func NewPool() Pool { return Pool(randomHex(poolBytes)) }

// ParsePool reads what [Pool] prints. Errors are ErrInvalidArgument.
func ParsePool(s string) (Pool, error) {
	if !isHex(s, poolBytes) {
		return "", fmt.Errorf("pool id %q: want %d lower-case hexadecimal digits: %w", s, 2*poolBytes, errdefs.ErrInvalidArgument)
	}
	return Pool(s), nil
}

// Kind is what a handle stands for, as it is written in handles.
type Kind string

// The kinds.
const (
	KindVolume   Kind = "vol"
	KindSnapshot Kind = "snap"
	KindGroup    Kind = "group"
	KindImage    Kind = "img"
)

// words are what messages call the kinds, and fields the fields of CSI that carry their handles.
var (
	words  = map[Kind]string{KindVolume: "volume", KindSnapshot: "snapshot", KindGroup: "group snapshot", KindImage: "image"}
	fields = map[Kind]string{KindVolume: "volume_id", KindSnapshot: "snapshot_id", KindGroup: "group_snapshot_id", KindImage: "image id"}
)

// Handle is a handle of any kind. The zero value names nothing. Handles can be compared with ==.
type Handle struct {
	kind   Kind
	pool   Pool
	random string
}

func draw(kind Kind, pool Pool) Handle {
	return Handle{kind: kind, pool: pool, random: randomHex(randomBytes)}
}

// Parse reads a handle of any kind. A string that is none is ErrNotFound.
func Parse(s string) (Handle, error) {
	parts := strings.Split(s, "-")
	if len(parts) != 3 || !isHex(parts[0], poolBytes) || words[Kind(parts[1])] == "" || !isHex(parts[2], randomBytes) {
		return Handle{}, fmt.Errorf("%.64q is no id of this driver: %w", s, errdefs.ErrNotFound)
	}
	return Handle{kind: Kind(parts[1]), pool: Pool(parts[0]), random: parts[2]}, nil
}

func parse(kind Kind, s string) (Handle, error) {
	if s == "" {
		return Handle{}, fmt.Errorf("%s is missing: %w", fields[kind], errdefs.ErrInvalidArgument)
	}
	h, err := Parse(s)
	if err != nil || h.kind != kind {
		return Handle{}, fmt.Errorf("%s %.64q: no %s of this driver has such an id: %w", words[kind], s, words[kind], errdefs.ErrNotFound)
	}
	return h, nil
}

// String returns the handle as CSI's ids are written, at most 51 bytes.
func (h Handle) String() string { return string(h.pool) + "-" + string(h.kind) + "-" + h.random }

// Kind returns what the handle stands for.
func (h Handle) Kind() Kind { return h.kind }

// Pool returns the pool that holds the object.
func (h Handle) Pool() Pool { return h.pool }

// In returns nil if the object is one of pool, and a [ForeignError] if it is another pool's.
func (h Handle) In(pool Pool) error {
	if h.pool == pool {
		return nil
	}
	return &ForeignError{Handle: h, Asked: pool}
}

// MarshalText is [Handle.String], for encoding/json.
func (h Handle) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// Volume is the handle of a volume.
type Volume struct{ Handle }

// NewVolume draws a handle for a new volume of a pool.
func NewVolume(pool Pool) Volume { return Volume{draw(KindVolume, pool)} }

// ParseVolume reads the handle of a volume. A string that is no such handle is ErrNotFound and not
// ErrInvalidArgument: to CSI it is the id of a volume that does not exist. An empty string is ErrInvalidArgument, a
// required field that is missing (CSI, Error Scheme).
func ParseVolume(s string) (Volume, error) {
	h, err := parse(KindVolume, s)
	return Volume{h}, err
}

// UnmarshalText is [ParseVolume], for encoding/json.
func (v *Volume) UnmarshalText(text []byte) (err error) {
	*v, err = ParseVolume(string(text))
	return err
}

// OnePool returns the pool that all volumes of a group are in. ErrFailedPrecondition, with volumes and pools, if they are in several:
// no pool can cut another one's volumes, let alone at the same moment (CSI, CreateVolumeGroupSnapshot Errors: cannot snapshot multiple
// volumes together). There has to be at least one volume.
func OnePool(volumes []Volume) (Pool, error) {
	places := []string{fmt.Sprintf("volume %s is in pool %s", volumes[0], volumes[0].pool)}
	seen := []Pool{volumes[0].pool}
	for _, v := range volumes {
		if !slices.Contains(seen, v.pool) {
			seen, places = append(seen, v.pool), append(places, fmt.Sprintf("%s in pool %s", v, v.pool))
		}
	}
	if len(seen) == 1 {
		return seen[0], nil
	}
	if len(places) > maxPlaces {
		places = append(places[:maxPlaces], "and so on")
	}
	return "", fmt.Errorf("only volumes of one pool can be cut at one moment, and %s; make a group snapshot for each pool: %w", strings.Join(places, ", "), errdefs.ErrFailedPrecondition)
}

// maxPlaces is how many pools a message names.
const maxPlaces = 16

// Snapshot is the handle of a snapshot, whether or not it is one of a group.
type Snapshot struct{ Handle }

// NewSnapshot draws a handle for a new snapshot in a pool.
func NewSnapshot(pool Pool) Snapshot { return Snapshot{draw(KindSnapshot, pool)} }

// ParseSnapshot reads the handle of a snapshot. Its errors are those of [ParseVolume].
func ParseSnapshot(s string) (Snapshot, error) {
	h, err := parse(KindSnapshot, s)
	return Snapshot{h}, err
}

// UnmarshalText is [ParseSnapshot], for encoding/json.
func (s *Snapshot) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSnapshot(string(text))
	return err
}

// Group is the handle of a group snapshot.
type Group struct{ Handle }

// NewGroup draws a handle for a new group snapshot in a pool.
func NewGroup(pool Pool) Group { return Group{draw(KindGroup, pool)} }

// ParseGroup reads the handle of a group snapshot. Its errors are those of [ParseVolume].
func ParseGroup(s string) (Group, error) {
	h, err := parse(KindGroup, s)
	return Group{h}, err
}

// UnmarshalText is [ParseGroup], for encoding/json.
func (g *Group) UnmarshalText(text []byte) (err error) {
	*g, err = ParseGroup(string(text))
	return err
}

// Image is the handle of a backing image. CSI never sees it by itself but as a part of a handle "bi://".
type Image struct{ Handle }

// NewImage draws a handle for a new image in a pool.
func NewImage(pool Pool) Image { return Image{draw(KindImage, pool)} }

// ParseImage reads the handle of an image. Its errors are those of [ParseVolume].
func ParseImage(s string) (Image, error) {
	h, err := parse(KindImage, s)
	return Image{h}, err
}

// UnmarshalText is [ParseImage], for encoding/json.
func (i *Image) UnmarshalText(text []byte) (err error) {
	*i, err = ParseImage(string(text))
	return err
}

// ForeignError says that an object is in another pool than the one that was asked. It is ErrNotFound. Whoever takes "not
// found" for "already gone" must look for it first.
type ForeignError struct {
	Handle Handle
	Asked  Pool
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("%s %s is in pool %s, and this plugin serves pool %s; send the call to the plugin of that pool",
		words[e.Handle.kind], e.Handle, e.Handle.pool, e.Asked)
}

// Unwrap makes the error ErrNotFound.
func (e *ForeignError) Unwrap() error { return errdefs.ErrNotFound }

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // it never returns an error
	return hex.EncodeToString(b)
}

func isHex(s string, bytes int) bool {
	return len(s) == 2*bytes && strings.Trim(s, "0123456789abcdef") == ""
}
