package csiplugin

import "github.com/container-storage-interface/spec/lib/go/csi"

const (
	// granule is what all sizes are a multiple of: the largest sector and the smallest filesystem block that anybody uses.
	granule = 4096
	// defaultSize is the size of a volume that was asked for without one.
	defaultSize = 1 << 30
)

// limits are the sizes in bytes that a volume can have.
type limits struct{ smallest, largest int64 }

// parseRange reads a capacity_range, which may be nil. Errors are ErrInvalidArgument.
func parseRange(r *csi.CapacityRange) (required, limit int64, err error) {
	required, limit = r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		err = invalid("capacity_range has a negative size")
	case r != nil && required == 0 && limit == 0:
		err = invalid("capacity_range has neither required_bytes nor limit_bytes")
	case limit > 0 && limit < required:
		err = invalid("capacity_range: limit_bytes %d is less than required_bytes %d", limit, required)
	}
	return required, limit, err
}

// planSize chooses the size of a new volume: what is required, raised to the smallest that is possible, in whole granules.
// Without a requirement it is [defaultSize], or what the limits leave of it. ErrOutOfRange if no size is within the range.
func planSize(r *csi.CapacityRange, l limits) (int64, error) {
	required, limit, err := parseRange(r)
	if err != nil {
		return 0, err
	}
	want := required
	if want == 0 {
		want = min(defaultSize, l.largest)
		if limit > 0 {
			want = min(want, limit-limit%granule)
		}
	}
	want = max(want, l.smallest)
	if want > l.largest {
		return 0, outOfRange("capacity_range: %d bytes are needed, the pool can hold %d", want, l.largest)
	}
	want = roundUp(want)
	if limit > 0 && want > limit {
		return 0, outOfRange("capacity_range: limit_bytes %d; the smallest size that is possible is %d (at least %d, in steps of %d)", limit, want, l.smallest, granule)
	}
	return want, nil
}

// planCloneSize is [planSize] for a volume that begins with the content of something of size bytes: that is its size if
// nothing else is asked for, and a smaller one, rounded as every size is, is ErrOutOfRange (CSI, CreateVolume).
func planCloneSize(r *csi.CapacityRange, l limits, size int64) (int64, error) {
	if size == 0 {
		return planSize(r, l)
	}
	required, limit, err := parseRange(r)
	switch {
	case err != nil:
		return 0, err
	case required > 0 && max(roundUp(min(required, l.largest)), l.smallest) < size:
		return 0, outOfRange("capacity_range: required_bytes %d; the source has %d, and a volume that is made from it has at least as many", required, size)
	case limit > 0 && limit < size:
		return 0, outOfRange("capacity_range: limit_bytes %d; the source has %d, and a volume that is made from it has at least as many", limit, size)
	}
	return planSize(&csi.CapacityRange{RequiredBytes: max(required, size), LimitBytes: limit}, l)
}

// planExpansion chooses the size of a volume after its expansion: its present one if that is enough. ErrOutOfRange if it is
// too large already, or no size is within the range.
func planExpansion(r *csi.CapacityRange, size int64, l limits) (int64, error) {
	if r == nil {
		return 0, invalid("capacity_range is missing")
	}
	required, limit, err := parseRange(r)
	switch {
	case err != nil:
		return 0, err
	case limit > 0 && size > limit:
		return 0, outOfRange("capacity_range: limit_bytes %d; the volume has %d already, and volumes do not shrink", limit, size)
	case required <= size:
		return size, nil
	case required > l.largest:
		return 0, outOfRange("capacity_range: %d bytes are required, the pool can hold %d", required, l.largest)
	}
	want := roundUp(required)
	if limit > 0 && want > limit {
		return 0, outOfRange("capacity_range: limit_bytes %d; the next size that is possible is %d (in steps of %d)", limit, want, granule)
	}
	return want, nil
}

func roundUp(n int64) int64 { return (n + granule - 1) / granule * granule }
