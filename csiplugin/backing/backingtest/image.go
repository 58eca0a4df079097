package backingtest

import (
	"bytes"
	"encoding/binary"

	"crust.dev/crust/csiplugin/backing"
)

// The layout of the images that [QCOW2] makes, in clusters of 64 KiB: header, refcount table, refcount block, L1 table, L2
// table, data.
const (
	Cluster = 64 << 10

	RefcountTable = 1 * Cluster
	RefcountBlock = 2 * Cluster
	L1Table       = 3 * Cluster
	L2Table       = 4 * Cluster
	FirstData     = 5 * Cluster

	copied = 1 << 63
)

// Offsets of fields of the header, for [Put64] and [Put32].
const (
	BackingOffset    = 8
	BackingSize      = 16
	ClusterBits      = 20
	Size             = 24
	CryptMethod      = 32
	L1Size           = 36
	L1Offset         = 40
	RefcountOffset   = 48
	RefcountClusters = 56
	Snapshots        = 60
	SnapshotsOffset  = 64
	Incompatible     = 72
	Autoclear        = 88
	RefcountOrder    = 96
	HeaderLength     = 100
	Extensions       = 112
)

// QCOW2 makes a qcow2 image of version 3 with a virtual size, of at most 512 MiB, and data at its beginning.
func QCOW2(virtualSize int64, data []byte) []byte {
	clusters := (len(data) + Cluster - 1) / Cluster
	image := make([]byte, FirstData+clusters*Cluster)
	copy(image, "QFI\xfb")
	Put32(image, 4, 3)
	Put32(image, ClusterBits, 16)
	Put64(image, Size, uint64(virtualSize))
	Put32(image, L1Size, uint32((virtualSize-1)/(Cluster*Cluster/8)+1))
	Put64(image, L1Offset, L1Table)
	Put64(image, RefcountOffset, RefcountTable)
	Put32(image, RefcountClusters, 1)
	Put32(image, RefcountOrder, 4)
	Put32(image, HeaderLength, 112)
	Put64(image, RefcountTable, RefcountBlock)
	for c := range len(image) / Cluster {
		binary.BigEndian.PutUint16(image[RefcountBlock+2*c:], 1)
	}
	if clusters > 0 {
		Put64(image, L1Table, L2Table|copied)
	}
	for c := range clusters {
		Put64(image, L2Table+8*c, uint64(FirstData+c*Cluster)|copied)
	}
	copy(image[FirstData:], data)
	return image
}

// Put64 writes a number as qcow2 has it.
func Put64(image []byte, at int, n uint64) { binary.BigEndian.PutUint64(image[at:], n) }

// Put32 is [Put64] with half as many bits.
func Put32(image []byte, at int, n uint32) { binary.BigEndian.PutUint32(image[at:], n) }

// Extension puts a header extension with a text into an image, and an end behind it.
func Extension(image []byte, kind uint32, text string) {
	Put32(image, Extensions, kind)
	Put32(image, Extensions+4, uint32(len(text)))
	end := copy(image[Extensions+8:], text) + Extensions + 8
	Put64(image, (end+7)&^7, 0)
}

// Backing gives an image a backing file.
func Backing(image []byte, name string) {
	const at = 4096
	Put64(image, BackingOffset, at)
	Put32(image, BackingSize, uint32(copy(image[at:], name)))
}

// External gives an image an external data file.
func External(image []byte, name string) {
	Put64(image, Incompatible, 1<<2)
	Extension(image, 0x44415441, name)
}

// Attack is an image that must be refused.
type Attack struct {
	// Name says what it does, and CVE where that was seen, if it was.
	Name, CVE string
	// Declared is what the attacker says that it is.
	Declared backing.Format
	Image    []byte
}

const mib = 1 << 20

// Attacks are images that make programs which trust them read, write or fill what is not theirs. Those that name a file of the
// host name secret.
func Attacks(secret string) []Attack {
	qcow2 := func(change func(image []byte)) []byte {
		image := QCOW2(mib, bytes.Repeat([]byte("data"), Cluster/4))
		change(image)
		return image
	}
	backingFile := qcow2(func(i []byte) { Backing(i, secret) })
	return []Attack{
		{"a backing file of the host", "CVE-2011-3147", backing.QCOW2, backingFile},
		{"a backing file by a relative path", "CVE-2014-0134", backing.QCOW2, qcow2(func(i []byte) { Backing(i, "../../../../.."+secret) })},
		{"a backing file by its format's name only", "", backing.QCOW2, qcow2(func(i []byte) { Extension(i, 0xE2792ACA, "raw") })},
		{"an external data file of the host", "CVE-2024-32498", backing.QCOW2, qcow2(func(i []byte) { External(i, secret) })},
		{"an external data file, raw by an auto-clear bit", "CVE-2024-32498", backing.QCOW2, qcow2(func(i []byte) { External(i, secret); Put64(i, Autoclear, 1<<1) })},
		{"the name of a data file without its bit", "CVE-2024-32498", backing.QCOW2, qcow2(func(i []byte) { Extension(i, 0x44415441, secret) })},
		{"the bit of a data file without its name", "CVE-2024-32498", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Incompatible, 1<<2) })},
		{"a json: name of a data file", "CVE-2024-4467", backing.QCOW2, qcow2(func(i []byte) {
			External(i, `json:{"driver":"raw","file":{"driver":"file","filename":"`+secret+`"}}`)
		})},
		{"a json: name of a backing file", "CVE-2024-4467", backing.QCOW2, qcow2(func(i []byte) {
			Backing(i, `json:{"file.driver":"nbd","file.host":"127.0.0.1"}`)
		})},
		{"a backing file, declared raw", "CVE-2024-40767", backing.Raw, backingFile},
		{"a VMDK descriptor of a flat extent, declared raw", "CVE-2022-47951", backing.Raw, descriptor(secret)},
		{"a VMDK descriptor, declared qcow2", "CVE-2022-47951", backing.QCOW2, descriptor(secret)},
		{"a VMDK descriptor after other comments, declared raw", "CVE-2024-40767", backing.Raw, append([]byte("# a\n\n  # b\n"), descriptor(secret)[len("# Disk DescriptorFile\n"):]...)},
		{"a sparse VMDK, declared raw", "CVE-2024-40767", backing.Raw, append([]byte("KDMV\x01\x00\x00\x00"), make([]byte, 4096)...)},
		{"a guest's qcow2 header on its raw disk", "CVE-2026-24708", backing.Raw, append(qcow2(func(i []byte) { External(i, secret) }), make([]byte, mib)...)},
		{"a disk of exabytes in a small file", "CVE-2013-2096", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Size, 1<<62) })},
		{"a disk that is larger than is allowed", "CVE-2013-4463", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Size, 1<<50); Put32(i, L1Size, 1<<21) })},
		{"an L1 table of gigabytes", "CVE-2014-0143", backing.QCOW2, qcow2(func(i []byte) { Put32(i, L1Size, 1<<31) })},
		{"an L1 table that is too short for the size", "CVE-2014-0145", backing.QCOW2, qcow2(func(i []byte) { Put32(i, L1Size, 0) })},
		{"an L1 table beyond the end", "CVE-2014-0147", backing.QCOW2, qcow2(func(i []byte) { Put64(i, L1Offset, 1<<40) })},
		{"an L1 table at the end of all numbers", "CVE-2014-0147", backing.QCOW2, qcow2(func(i []byte) { Put64(i, L1Offset, ^uint64(0)&^(Cluster-1)) })},
		{"a refcount table of gigabytes", "CVE-2014-0147", backing.QCOW2, qcow2(func(i []byte) { Put32(i, RefcountClusters, 1<<30) })},
		{"clusters of no size", "CVE-2014-0142", backing.QCOW2, qcow2(func(i []byte) { Put32(i, ClusterBits, 0) })},
		{"clusters of 2^31 bytes", "CVE-2014-0142", backing.QCOW2, qcow2(func(i []byte) { Put32(i, ClusterBits, 31) })},
		{"65536 snapshots", "CVE-2014-0145", backing.QCOW2, qcow2(func(i []byte) { Put32(i, Snapshots, 65536); Put64(i, SnapshotsOffset, FirstData) })},
		{"bitmaps", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Autoclear, 1); Extension(i, 0x23852875, "bitmaps of 24 bytes.....") })},
		{"an incompatible feature from the future", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Incompatible, 1<<40) })},
		{"extended L2 entries", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Incompatible, 1<<4) })},
		{"a corrupt image", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Incompatible, 1<<1) })},
		{"an encrypted image", "", backing.QCOW2, qcow2(func(i []byte) { Put32(i, CryptMethod, 2) })},
		{"a header extension without end", "", backing.QCOW2, qcow2(func(i []byte) { Put32(i, Extensions, 0x6803F857); Put32(i, Extensions+4, ^uint32(0)) })},
		{"a header extension that nobody knows", "", backing.QCOW2, qcow2(func(i []byte) { Extension(i, 0x12345678, secret) })},
		{"one piece of data for the whole disk", "", backing.QCOW2, qcow2(func(i []byte) {
			for c := 1; c < 16; c++ {
				Put64(i, L2Table+8*c, FirstData|copied)
			}
		})},
		{"one L2 table for the whole disk", "", backing.QCOW2, qcow2(func(i []byte) {
			Put64(i, Size, 1<<30)
			Put32(i, L1Size, 2)
			Put64(i, L1Table+8, L2Table|copied)
		})},
		{"data that is the header", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, L2Table, copied) })},
		{"data that is the L1 table", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, L2Table, L1Table|copied) })},
		{"data that was cut off", "", backing.QCOW2, qcow2(func([]byte) {})[:FirstData+100]},
		{"a table that was cut off", "", backing.QCOW2, qcow2(func([]byte) {})[:L2Table+8]},
		{"data beyond the guest's end", "", backing.QCOW2, qcow2(func(i []byte) { Put64(i, Size, 512); Put64(i, L2Table+8*3, FirstData|copied) })},
		{"a qcow2 image of version 1", "", backing.QCOW2, qcow2(func(i []byte) { Put32(i, 4, 1) })},
		{"a QED image, declared raw", "", backing.Raw, append([]byte("QED\x00"), make([]byte, 4096)...)},
		{"a VHD with its footer only, declared raw", "", backing.Raw, append(make([]byte, 4096), append([]byte("conectix"), make([]byte, 504)...)...)},
		{"a VHDX, declared raw", "", backing.Raw, append([]byte("vhdxfile"), make([]byte, 4096)...)},
		{"a VDI, declared raw", "", backing.Raw, append(append(make([]byte, 0x40), 0x7f, 0x10, 0xda, 0xbe), make([]byte, 4096)...)},
		{"a compressed file, declared raw", "", backing.Raw, append([]byte("\x1f\x8b\x08\x00"), make([]byte, 4096)...)},
	}
}

// descriptor is a VMDK of one flat extent, which is a file of the host.
func descriptor(secret string) []byte {
	text := "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \"" + secret + "\" 0\n"
	return append([]byte(text), make([]byte, 4096)...)
}
