package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
)

// layout follows the tables of an image. Each cluster of the file has one use: without snapshots nothing is shared, so what
// is found in two places is either damaged or meant to grow when it is read (a bomb). Compressed data is the exception:
// several pieces of it may lie in one cluster.
//
// What a table points to has to be in the file. QEMU reads zeros beyond its end and says nothing, so that an image that was
// cut off would become a disk with holes.
type layout struct {
	r           io.ReaderAt
	size        int64
	bits        uint
	cluster     int64
	used        []uint64 // a bit for each cluster of the file
	virtualSize int64

	data, compressed int64
}

const (
	offsetMask  = 0x00FFFFFFFFFFFE00 // bits 9 to 55 of an entry
	copiedBit   = 1 << 63
	compressBit = 1 << 62
	zeroBit     = 1
	reservedL1  = ^uint64(offsetMask | copiedBit)
	reservedL2  = ^uint64(offsetMask | copiedBit | zeroBit)
	reservedRef = 0x1FF
	sectorBytes = 512
)

func newLayout(r io.ReaderAt, size int64, h header) (*layout, error) {
	l := &layout{r: r, size: size, bits: uint(h.ClusterBits), cluster: 1 << h.ClusterBits, virtualSize: int64(h.Size)}
	if size>>l.bits > 1<<36 { // 8 GiB of bits
		return nil, refused("it has %d bytes in clusters of %d", size, l.cluster)
	}
	l.used = make([]uint64, (size>>l.bits)/64+1)
	return l, l.take("the header", 0, min(l.cluster, size))
}

// take marks the clusters that length bytes at an offset are in. All of them have to be in the file, and free.
func (l *layout) take(what string, offset uint64, length int64) error {
	if offset%uint64(l.cluster) != 0 {
		return refused("%s begins at %d, which is no multiple of the cluster size", what, offset)
	}
	if err := l.within(what, offset, length); err != nil {
		return err
	}
	for c := int64(offset) >> l.bits; c<<l.bits < int64(offset)+length; c++ {
		if l.used[c/64]&(1<<(c%64)) != 0 {
			return refused("%s is in cluster %d, which is in use already", what, c)
		}
		l.used[c/64] |= 1 << (c % 64)
	}
	return nil
}

func (l *layout) within(what string, offset uint64, length int64) error {
	if length > l.size || offset > uint64(l.size-length) {
		return refused("%s is at %d with %d bytes, and the file ends at %d: it was cut off", what, offset, length, l.size)
	}
	return nil
}

// table takes and reads a table of entries of 8 bytes.
func (l *layout) table(what string, offset uint64, entries int64) ([]uint64, error) {
	if err := l.take(what, offset, entries*8); err != nil {
		return nil, err
	}
	raw := make([]byte, entries*8)
	if _, err := io.ReadFull(io.NewSectionReader(l.r, int64(offset), int64(len(raw))), raw); err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	table := make([]uint64, entries)
	for i := range table {
		table[i] = binary.BigEndian.Uint64(raw[8*i:])
	}
	return table, nil
}

func (l *layout) walk(h header) error {
	if err := l.refcounts(h); err != nil {
		return err
	}
	l1, err := l.table("the L1 table", h.L1Offset, int64(h.L1Size))
	if err != nil {
		return err
	}
	perTable := l.cluster / 8
	for i, entry := range l1 {
		switch {
		case entry&reservedL1 != 0:
			return refused("L1 entry %d is %#x, which has reserved bits set", i, entry)
		case entry&offsetMask == 0:
			continue
		}
		l2, err := l.table("an L2 table", entry&offsetMask, perTable)
		if err != nil {
			return err
		}
		for j, entry := range l2 {
			if err := l.entry(h, (int64(i)*perTable+int64(j))<<l.bits, entry); err != nil {
				return err
			}
		}
	}
	return nil
}

// refcounts takes the refcount table and its blocks. What is counted in them does not matter for reading.
func (l *layout) refcounts(h header) error {
	table, err := l.table("the refcount table", h.RefcountOffset, int64(h.RefcountClusters)<<l.bits/8)
	if err != nil {
		return err
	}
	for _, entry := range table {
		if entry == 0 {
			continue
		}
		if entry&reservedRef != 0 {
			return refused("a refcount block is at %#x, which has reserved bits set", entry)
		}
		if err := l.take("a refcount block", entry, l.cluster); err != nil {
			return err
		}
	}
	return nil
}

// entry checks what an L2 entry says of the guest's cluster at an offset.
func (l *layout) entry(h header, guest int64, entry uint64) error {
	if entry == 0 {
		return nil
	}
	if guest >= l.virtualSize {
		return refused("it has data at %d, beyond its end", guest)
	}
	if entry&compressBit != 0 {
		return l.compressedEntry(entry)
	}
	zero := entry&zeroBit != 0
	if entry&reservedL2 != 0 || zero && h.Version < 3 {
		return refused("an L2 entry is %#x, which has reserved bits set", entry)
	}
	offset := entry & offsetMask
	if offset == 0 {
		if !zero {
			return refused("an L2 entry is %#x: data in the header", entry)
		}
		return nil
	}
	if !zero {
		l.data += l.cluster
	}
	// A file may end in the middle of its last cluster, but not before what the guest sees of it.
	return l.take("data", offset, min(l.cluster, l.virtualSize-guest))
}

// compressedEntry checks a piece of compressed data: an offset in the lower bits and how many further sectors of 512 bytes it
// reaches into. The last of them need not be whole.
func (l *layout) compressedEntry(entry uint64) error {
	if entry&copiedBit != 0 {
		return refused("an L2 entry is %#x: compressed, and marked as having one user", entry)
	}
	split := 62 - (l.bits - 8)
	offset := entry & (1<<split - 1)
	sectors := entry & (compressBit - 1) >> split
	length := int64(sectors+1)*sectorBytes - int64(offset%sectorBytes)
	if offset == 0 || offset>>56 != 0 {
		return refused("an L2 entry is %#x: compressed data at %d", entry, offset)
	}
	l.compressed++
	l.data += l.cluster
	return l.within("compressed data", offset, min(length, max(1, length-sectorBytes+1)))
}
