package catalog

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"

	"github.com/containerd/errdefs"
)

// bbolt maps its file and follows the offsets and page numbers that it finds; in a damaged file they lead anywhere in
// this process's memory. checkPages therefore walks the pages first, with bounds. What is in them is for others to check.
//
// A page is a header and its elements: id uint64, flags uint16, count uint16, overflow uint32 (further pages that belong
// to it). All numbers are the machine's own (bbolt, internal/common/page.go, meta.go).
const (
	headerBytes  = 16
	elementBytes = 16
	metaBytes    = 64
	bucketBytes  = 16

	branchFlag   = 0x01
	leafFlag     = 0x02
	freelistFlag = 0x10
	bucketFlag   = 0x01 // of a leaf's element

	boltMagic   = 0xED0CDAED
	boltVersion = 2
)

var native = binary.NativeEndian

type pages struct {
	raw      []byte
	pageSize uint64
	end      uint64 // the first page number that is not in use
	seen     map[uint64]bool
}

// checkPages reports ErrDataLoss if the pages of a bbolt file do not stay within it and apart from each other.
func checkPages(raw []byte) error {
	root, freelist, p, err := newestMeta(raw)
	if err != nil {
		return err
	}
	if err := p.checkFreelist(freelist); err != nil {
		return err
	}
	return p.checkTree(root)
}

// newestMeta finds the valid meta page with the highest transaction number, as bbolt does.
func newestMeta(raw []byte) (root, freelist uint64, p *pages, err error) {
	var newest uint64
	for _, start := range metaStarts(raw) {
		m := raw[start+headerBytes:][:metaBytes]
		h := fnv.New64a()
		_, _ = h.Write(m[:56])
		if native.Uint32(m) != boltMagic || native.Uint32(m[4:]) != boltVersion || native.Uint64(m[56:]) != h.Sum64() {
			continue
		}
		if txid := native.Uint64(m[48:]); p == nil || txid > newest {
			newest = txid
			root, freelist = native.Uint64(m[16:]), native.Uint64(m[32:])
			p = &pages{raw: raw, pageSize: uint64(native.Uint32(m[8:])), end: native.Uint64(m[40:]), seen: map[uint64]bool{}}
		}
	}
	switch {
	case p == nil:
		return 0, 0, nil, damaged("it has no valid meta page")
	case p.pageSize < headerBytes+metaBytes || p.pageSize > 1<<16 || p.end < 2 || p.end > uint64(len(raw))/p.pageSize:
		return 0, 0, nil, damaged("it has %d bytes of %d pages of %d", len(raw), p.end, p.pageSize)
	}
	return root, freelist, p, nil
}

// metaStarts are the offsets of the first two pages: the second one's depends on the page size that the first one names,
// or, if that is damaged, has to be searched for.
func metaStarts(raw []byte) (starts []uint64) {
	for _, start := range []uint64{0, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16} {
		if start+headerBytes+metaBytes > uint64(len(raw)) {
			break
		}
		size := uint64(native.Uint32(raw[start+headerBytes+8:]))
		if start == 0 || start == size {
			starts = append(starts, start)
		}
	}
	return starts
}

// page returns a page with its overflow, or nothing if it is not within the file or was met before.
func (p *pages) page(id uint64) ([]byte, error) {
	if id < 2 || id >= p.end {
		return nil, damaged("page %d of %d does not exist", id, p.end)
	}
	first := p.raw[id*p.pageSize:]
	last := id + uint64(native.Uint32(first[12:]))
	if native.Uint64(first) != id || last >= p.end {
		return nil, damaged("page %d says that it is page %d to %d of %d", id, native.Uint64(first), last, p.end)
	}
	for i := id; i <= last; i++ {
		if p.seen[i] {
			return nil, damaged("page %d is in use twice", i)
		}
		p.seen[i] = true
	}
	return first[:(last-id+1)*p.pageSize], nil
}

func (p *pages) checkFreelist(id uint64) error {
	page, err := p.page(id)
	if err != nil {
		return err
	}
	if native.Uint16(page[8:]) != freelistFlag {
		return damaged("page %d is no free list", id)
	}
	count, ids := uint64(native.Uint16(page[10:])), page[headerBytes:]
	if count == 0xFFFF { // more than fit in: the first entry is their number
		count, ids = native.Uint64(ids), ids[8:]
	}
	if count > uint64(len(ids))/8 {
		return damaged("the free list has %d entries in %d bytes", count, len(ids))
	}
	for i := range count {
		free := native.Uint64(ids[8*i:])
		if free < 2 || free >= p.end || p.seen[free] {
			return damaged("the free list names page %d", free)
		}
		p.seen[free] = true
	}
	return nil
}

func (p *pages) checkTree(id uint64) error {
	page, err := p.page(id)
	if err != nil {
		return err
	}
	return p.checkElements(page)
}

// checkElements checks the elements of a branch or leaf, which may be a page or, in a small bucket, part of one.
func (p *pages) checkElements(page []byte) error {
	flags, count := native.Uint16(page[8:]), int(native.Uint16(page[10:]))
	if headerBytes+count*elementBytes > len(page) || flags != branchFlag && flags != leafFlag || flags == branchFlag && count == 0 {
		return damaged("a page has flags %#x and %d elements in %d bytes", flags, count, len(page))
	}
	for i := range count {
		at := page[headerBytes+i*elementBytes:]
		var err error
		if flags == branchFlag {
			err = p.checkBranch(at)
		} else {
			err = p.checkLeaf(at)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkBranch checks pos uint32, ksize uint32, pgid uint64. Positions count from the element.
func (p *pages) checkBranch(at []byte) error {
	if pos, key := uint64(native.Uint32(at)), uint64(native.Uint32(at[4:])); pos+key > uint64(len(at)) {
		return damaged("a key lies outside of its page")
	}
	return p.checkTree(native.Uint64(at[8:]))
}

// checkLeaf checks flags uint32, pos uint32, ksize uint32, vsize uint32, and the bucket that the value may be.
func (p *pages) checkLeaf(at []byte) error {
	flags := native.Uint32(at)
	pos, key, size := uint64(native.Uint32(at[4:])), uint64(native.Uint32(at[8:])), uint64(native.Uint32(at[12:]))
	if pos+key+size > uint64(len(at)) {
		return damaged("a value lies outside of its page")
	}
	if flags&bucketFlag == 0 {
		return nil
	}
	value := at[pos+key:][:size]
	if len(value) < bucketBytes {
		return damaged("a bucket has %d bytes", len(value))
	}
	if root := native.Uint64(value); root != 0 {
		return p.checkTree(root)
	}
	if inline := value[bucketBytes:]; len(inline) >= headerBytes && native.Uint16(inline[8:]) == leafFlag {
		return p.checkElements(inline)
	}
	return damaged("a bucket within a page is no leaf")
}

func damaged(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrDataLoss)...)
}
