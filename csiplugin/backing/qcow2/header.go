package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
)

// Limits are what an image may be at most.
type Limits struct {
	// VirtualSize in bytes is what the guest may see.
	VirtualSize int64
}

// Info is what is known of an image that was accepted. Sizes are in bytes.
type Info struct {
	Version     int
	VirtualSize int64
	ClusterSize int64
	// Data is how many bytes of clusters the image has, Compressed how many clusters are compressed.
	Data, Compressed int64
}

// header is that of version 2, and what version 3 adds, in the order of the file; all numbers are big endian.
type header struct {
	Magic, Version        uint32
	BackingOffset         uint64
	BackingSize           uint32
	ClusterBits           uint32
	Size                  uint64
	CryptMethod           uint32
	L1Size                uint32
	L1Offset              uint64
	RefcountOffset        uint64
	RefcountClusters      uint32
	Snapshots             uint32
	SnapshotsOffset       uint64
	Incompatible          uint64 // from here on version 3
	Compatible, Autoclear uint64
	RefcountOrder         uint32
	HeaderLength          uint32
}

const (
	magic    = 0x514649FB // "QFI\xfb"
	lengthV2 = 72
	lengthV3 = 104
	// lengthWithCompression is from which length on a header has compression_type.
	lengthWithCompression = 112

	minClusterBits, maxClusterBits = 9, 21
	// maxL1Size is the largest L1 table in entries, and maxRefcount the largest refcount table in bytes, that QEMU opens
	// (block/qcow2.h, QCOW_MAX_L1_SIZE, QCOW_MAX_REFTABLE_SIZE).
	maxL1Size   = 32 << 20 / 8
	maxRefcount = 8 << 20
)

// The incompatible features.
const (
	dirty       = 1 << 0
	corrupt     = 1 << 1
	dataFile    = 1 << 2
	compression = 1 << 3
	extendedL2  = 1 << 4
)

// The header extensions.
const (
	endOfExtensions = 0
	featureNames    = 0x6803F857
	backingFormat   = 0xE2792ACA
	dataFileName    = 0x44415441
	encryption      = 0x0537BE77
	bitmaps         = 0x23852875
)

func refused(format string, args ...any) error {
	return fmt.Errorf("the qcow2 image is refused: %w: %w", fmt.Errorf(format, args...), errdefs.ErrInvalidArgument)
}

// Inspect reads an image of size bytes to the last table. Errors of reading come back as they are; everything else that is
// wrong is ErrInvalidArgument and says what would help, but a virtual size beyond the limits, which is ErrOutOfRange. It takes
// memory in proportion to the number of clusters, a bit for each, and at most as much time as reading the file once.
func Inspect(r io.ReaderAt, size int64, limits Limits) (Info, error) {
	h, err := readHeader(r, size)
	if err != nil {
		return Info{}, err
	}
	info := Info{Version: int(h.Version), VirtualSize: int64(h.Size), ClusterSize: 1 << h.ClusterBits}
	if err := h.check(limits); err != nil {
		return Info{}, err
	}
	if h.Version == 3 {
		if err := h.checkExtensions(r, size); err != nil {
			return Info{}, err
		}
	}
	l, err := newLayout(r, size, h)
	if err != nil {
		return Info{}, err
	}
	if err := l.walk(h); err != nil {
		return Info{}, err
	}
	info.Data, info.Compressed = l.data, l.compressed
	return info, nil
}

func readHeader(r io.ReaderAt, size int64) (h header, err error) {
	if size < lengthV2 {
		return h, refused("it has %d bytes, which is less than a header", size)
	}
	// Version 2 ends before; what is read beyond is not looked at.
	raw := make([]byte, lengthV3)
	if _, err := io.ReadFull(io.NewSectionReader(r, 0, min(size, lengthV3)), raw[:min(size, lengthV3)]); err != nil {
		return h, fmt.Errorf("read the header: %w", err)
	}
	if _, err := binary.Decode(raw, binary.BigEndian, &h); err != nil {
		return h, err
	}
	switch {
	case h.Magic != magic:
		return h, refused("it is declared to be qcow2 and does not begin so; declare what it is (export-type)")
	case h.Version == 2:
		h.Incompatible, h.Compatible, h.Autoclear, h.RefcountOrder, h.HeaderLength = 0, 0, 0, 4, lengthV2
	case h.Version != 3:
		return h, refused("it has version %d; convert it with qemu-img convert -O qcow2", h.Version)
	case size < lengthV3:
		return h, refused("it has %d bytes, which is less than a header", size)
	}
	return h, nil
}

// check looks at the header alone.
func (h header) check(limits Limits) error {
	switch {
	case h.BackingOffset != 0 || h.BackingSize != 0:
		return refused("it has a backing file, of which nobody knows here; make it one file with qemu-img convert -O qcow2")
	case h.CryptMethod != 0:
		return refused("it is encrypted (method %d)", h.CryptMethod)
	case h.Incompatible&dataFile != 0:
		return refused("its data is in an external data file; make it one file with qemu-img convert -O qcow2")
	case h.Incompatible&corrupt != 0:
		return refused("it is marked as corrupt; mend it with qemu-img check -r all")
	case h.Incompatible&dirty != 0:
		return refused("it was not closed properly; mend it with qemu-img check -r all")
	case h.Incompatible&extendedL2 != 0:
		return refused("it has extended L2 entries; convert it with qemu-img convert -O qcow2")
	case h.Incompatible&^uint64(compression) != 0:
		return refused("it has incompatible features that are not known, %#x", h.Incompatible&^uint64(compression))
	case h.Autoclear != 0:
		return refused("it has auto-clear features (%#x): bitmaps, or an external data file; convert it with qemu-img convert -O qcow2", h.Autoclear)
	case h.ClusterBits < minClusterBits || h.ClusterBits > maxClusterBits:
		return refused("it has clusters of 2^%d bytes; 2^%d to 2^%d are possible", h.ClusterBits, minClusterBits, maxClusterBits)
	case h.Snapshots != 0 || h.SnapshotsOffset != 0:
		return refused("it has %d snapshots in it; leave them out with qemu-img convert -O qcow2", h.Snapshots)
	case h.Size == 0 || h.Size%512 != 0:
		return refused("it has %d bytes, which is no disk of sectors of 512", h.Size)
	case h.Size > uint64(limits.VirtualSize):
		return fmt.Errorf("the qcow2 image is refused: its virtual size is %d bytes, %d are allowed: %w", h.Size, limits.VirtualSize, errdefs.ErrOutOfRange)
	case h.RefcountOrder > 6:
		return refused("it has reference counts of 2^%d bits", h.RefcountOrder)
	case h.L1Size > maxL1Size:
		return refused("its L1 table has %d entries, %d are allowed", h.L1Size, maxL1Size)
	case uint64(h.L1Size) < h.l1Needed():
		return refused("its L1 table has %d entries, its size needs %d", h.L1Size, h.l1Needed())
	case h.RefcountClusters == 0 || uint64(h.RefcountClusters)<<h.ClusterBits > maxRefcount:
		return refused("its refcount table has %d clusters", h.RefcountClusters)
	}
	return nil
}

// l1Needed is how many entries of the L1 table it takes for the size. An entry stands for a cluster of L2 entries.
func (h header) l1Needed() uint64 {
	each := uint64(1) << (2*h.ClusterBits - 3)
	return (h.Size-1)/each + 1
}

// checkExtensions reads what follows the header. Only the names of features, which mean nothing, are accepted.
func (h header) checkExtensions(r io.ReaderAt, size int64) error {
	cluster := int64(1) << h.ClusterBits
	if h.HeaderLength < lengthV3 || int64(h.HeaderLength) > min(cluster, size) || h.HeaderLength%8 != 0 {
		return refused("its header has %d bytes", h.HeaderLength)
	}
	raw := make([]byte, min(cluster, size))
	if _, err := io.ReadFull(io.NewSectionReader(r, 0, int64(len(raw))), raw); err != nil {
		return fmt.Errorf("read the header extensions: %w", err)
	}
	if err := checkCompression(h, raw); err != nil {
		return err
	}
	for rest := raw[h.HeaderLength:]; len(rest) >= 8; {
		kind, length := binary.BigEndian.Uint32(rest), int64(binary.BigEndian.Uint32(rest[4:]))
		rest = rest[8:]
		padded := (length + 7) &^ 7
		switch {
		case padded > int64(len(rest)): // QEMU looks at the length of the last one, too
			return refused("a header extension has %d bytes and does not end in the first cluster", length)
		case kind == endOfExtensions:
			return nil
		case kind == backingFormat:
			return refused("it names the format of a backing file; make it one file with qemu-img convert -O qcow2")
		case kind == dataFileName:
			return refused("it names an external data file; make it one file with qemu-img convert -O qcow2")
		case kind == encryption:
			return refused("it is encrypted")
		case kind == bitmaps:
			return refused("it has bitmaps in it; leave them out with qemu-img convert -O qcow2")
		case kind != featureNames:
			return refused("it has a header extension that is not known, %#x", kind)
		}
		rest = rest[padded:]
	}
	return nil
}

// checkCompression checks compression_type, zlib (0) or zstd (1), and that the feature bit says the same.
func checkCompression(h header, raw []byte) error {
	kind := byte(0)
	if h.HeaderLength >= lengthWithCompression {
		kind = raw[lengthV3]
	}
	if kind > 1 || kind == 1 != (h.Incompatible&compression != 0) {
		return refused("it has compression type %d, and its incompatible features are %#x", kind, h.Incompatible)
	}
	return nil
}
