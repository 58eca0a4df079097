package vm_test

import (
	"encoding/binary"
	"hash/crc32"
	"testing"
)

// content is something that can be on a device, and how its finder calls it.
type content struct {
	name  string
	size  int64
	write func(t *testing.T, path string)
	says  string // must be in the refusal
}

// contents are devices that must never be formatted for ext4 or XFS, whatever the storage says of them. What Linux tools
// make without a device mapper is made by them.
var contents = []content{
	{"btrfs", 128 * mib, func(t *testing.T, path string) { mustHost(t, "mkfs.btrfs", "-q", path) }, "btrfs"},
	{"a LUKS container", usual, func(t *testing.T, path string) {
		key := newImage(t, 32)
		mustHost(t, "cryptsetup", "luksFormat", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--key-file", key, path)
	}, "LUKS"},
	{"a partition table (GPT)", usual, gpt, "partition table (gpt)"},
	{"a partition table (MBR)", usual, mbr, "partition table (dos)"},
	{"an LVM physical volume", usual, lvm, "LVM physical volume"},
	{"swap space", usual, func(t *testing.T, path string) { mustHost(t, "mkswap", path) }, "swap"},
	{"signatures of two filesystems", usual, func(t *testing.T, path string) {
		other := newImage(t, usual)
		mustHost(t, "mkfs.btrfs", "-q", other)
		mustHost(t, "mkfs.ext4", "-q", path)
		const at, length = 64 << 10, 4 << 10 // of btrfs's superblock
		put(t, path, at, get(t, other, at, length))
	}, "more than one kind"},
	{"data at the far end", usual, func(t *testing.T, path string) { put(t, path, usual-1, []byte{1}) }, "offset 335544319"},
	{"data in the middle of a small device", 32 * mib, func(t *testing.T, path string) { put(t, path, 16*mib+12345, []byte{1}) }, "offset 16789561"},
	{"data at the beginning", usual, func(t *testing.T, path string) { put(t, path, 0, []byte("my own format")) }, "offset 0"},
}

// gpt writes a GUID partition table with no partitions (UEFI specification, section 5.3).
func gpt(t *testing.T, path string) {
	mbr(t, path)
	put(t, path, 446+4, []byte{0xee}) // protective
	const entries, entryBytes, sector = 128, 128, 512
	header := make([]byte, 92)
	copy(header, "EFI PART")
	le := binary.LittleEndian
	le.PutUint32(header[8:], 0x10000)
	le.PutUint32(header[12:], 92)
	le.PutUint64(header[24:], 1)
	le.PutUint64(header[32:], usual/sector-1)
	le.PutUint64(header[40:], 34)
	le.PutUint64(header[48:], usual/sector-34)
	copy(header[56:], "0123456789abcdef")
	le.PutUint64(header[72:], 2)
	le.PutUint32(header[80:], entries)
	le.PutUint32(header[84:], entryBytes)
	le.PutUint32(header[88:], crc32.ChecksumIEEE(make([]byte, entries*entryBytes)))
	le.PutUint32(header[16:], crc32.ChecksumIEEE(header))
	put(t, path, sector, header)
}

// mbr writes a partition table with one partition.
func mbr(t *testing.T, path string) {
	sector := make([]byte, 512)
	copy(sector[446:], []byte{0, 0, 2, 0, 0x83, 0, 0, 0})
	binary.LittleEndian.PutUint32(sector[454:], 1)
	binary.LittleEndian.PutUint32(sector[458:], usual/512-1)
	sector[510], sector[511] = 0x55, 0xaa
	put(t, path, 0, sector)
}

// lvm writes the label of a physical volume (lib/format_text/layout.h of LVM2).
func lvm(t *testing.T, path string) {
	label := make([]byte, 512)
	copy(label, "LABELONE")
	le := binary.LittleEndian
	le.PutUint64(label[8:], 1)
	le.PutUint32(label[20:], 32)
	copy(label[24:], "LVM2 001")
	copy(label[32:], "0123456789abcdefghijklmnopqrstuv")
	le.PutUint64(label[64:], usual)
	// LVM's checksum is the usual one with another beginning and end.
	le.PutUint32(label[16:], ^crc32.Update(^uint32(0xf597a6cf), crc32.IEEETable, label[20:]))
	put(t, path, 512, label)
}
