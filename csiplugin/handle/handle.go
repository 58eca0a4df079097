package handle

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

const (
	poolBytes   = 6
	randomBytes = 16
	volumeKind  = "vol"
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

// Volume is the handle of a volume. The zero value names no volume. Handles can be compared with ==.
type Volume struct {
	pool   Pool
	random string
}

// NewVolume draws a handle for a new volume of a pool.
func NewVolume(pool Pool) Volume { return Volume{pool: pool, random: randomHex(randomBytes)} }

// ParseVolume reads what [Volume.String] returns. A string that is no such handle is ErrNotFound and not
// ErrInvalidArgument: to CSI it is the id of a volume that does not exist. An empty string is ErrInvalidArgument, a
// required field that is missing (CSI, Error Scheme).
func ParseVolume(s string) (Volume, error) {
	if s == "" {
		return Volume{}, fmt.Errorf("volume_id is missing: %w", errdefs.ErrInvalidArgument)
	}
	parts := strings.Split(s, "-")
	if len(parts) != 3 || !isHex(parts[0], poolBytes) || parts[1] != volumeKind || !isHex(parts[2], randomBytes) {
		return Volume{}, fmt.Errorf("volume %.64q: no volume of this driver has such an id: %w", s, errdefs.ErrNotFound)
	}
	return Volume{pool: Pool(parts[0]), random: parts[2]}, nil
}

// String returns the handle as CSI's volume_id, 49 bytes.
func (v Volume) String() string { return string(v.pool) + "-" + volumeKind + "-" + v.random }

// Pool returns the pool that holds the volume.
func (v Volume) Pool() Pool { return v.pool }

// In returns nil if the volume is one of pool, and a [ForeignError] if it is another pool's.
func (v Volume) In(pool Pool) error {
	if v.pool == pool {
		return nil
	}
	return &ForeignError{Volume: v, Asked: pool}
}

// MarshalText is [Volume.String], for encoding/json.
func (v Volume) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText is [ParseVolume], for encoding/json.
func (v *Volume) UnmarshalText(text []byte) (err error) {
	*v, err = ParseVolume(string(text))
	return err
}

// ForeignError says that a volume is in another pool than the one that was asked. It is ErrNotFound. Whoever takes "not
// found" for "already gone" must look for it first.
type ForeignError struct {
	Volume Volume
	Asked  Pool
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("volume %s is in pool %s, and this plugin serves pool %s; send the call to the plugin of that pool", e.Volume, e.Volume.pool, e.Asked)
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
