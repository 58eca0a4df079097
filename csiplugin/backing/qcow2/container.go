package qcow2

import (
	"bytes"
	"fmt"
	"io"
)

// signature is what a file has at an offset if it is of a format. A negative offset counts from the end.
type signature struct {
	format string
	at     int64
	bytes  string
}

// signatures are those by which QEMU and its like guess formats of disk images (block/*.c, their probe functions), and those
// of compressed files, which are no disk images but what people put in their place.
var signatures = []signature{
	{"qcow or qcow2", 0, "QFI\xfb"},
	{"QED", 0, "QED\x00"},
	{"VMDK", 0, "KDMV"},
	{"VMDK", 0, "COWD"},
	{"VMDK", 0, "# Disk DescriptorFile"},
	{"VHD", 0, "conectix"},
	{"VHD", -512, "conectix"},
	{"VHDX", 0, "vhdxfile"},
	{"VDI", 0x40, "\x7f\x10\xda\xbe"},
	{"Parallels", 0, "WithoutFreeSpace"},
	{"Parallels", 0, "WithouFreSpacExt"},
	{"DMG", -512, "koly"},
	{"Bochs", 0, "Bochs Virtual HD Image"},
	{"cloop", 0, "#!/bin/sh\n#V2.0 Format\nmodprobe cloop"},
	{"gzip", 0, "\x1f\x8b\x08"},
	{"xz", 0, "\xfd7zXZ\x00"},
	{"zstd", 0, "\x28\xb5\x2f\xfd"},
	{"bzip2", 0, "BZh"},
	{"LZ4", 0, "\x04\x22\x4d\x18"},
	{"zip", 0, "PK\x03\x04"},
}

// Container names the format that a file of size bytes looks like, or "" if it looks like nothing in particular, as a raw
// disk does. A partition table or a filesystem is nothing in particular. A text before a VMDK's descriptor is looked through as
// QEMU does: comments, spaces and empty lines may come first.
func Container(r io.ReaderAt, size int64) (string, error) {
	head := make([]byte, min(size, 2048))
	if _, err := io.ReadFull(io.NewSectionReader(r, 0, size), head); err != nil {
		return "", fmt.Errorf("read the beginning: %w", err)
	}
	var tail []byte
	if size >= 512 {
		tail = make([]byte, 512)
		if _, err := io.ReadFull(io.NewSectionReader(r, size-512, 512), tail); err != nil {
			return "", fmt.Errorf("read the end: %w", err)
		}
	}
	for _, s := range signatures {
		where := head
		at := s.at
		if at < 0 {
			where, at = tail, 0
		}
		if int64(len(where)) > at && bytes.HasPrefix(where[at:], []byte(s.bytes)) {
			return s.format, nil
		}
	}
	if isDescriptor(head) {
		return "VMDK", nil
	}
	return "", nil
}

// isDescriptor looks for "version=" of 1 to 3 after comments and empty lines (block/vmdk.c, vmdk_probe).
func isDescriptor(head []byte) bool {
	for line := range bytes.Lines(head) {
		text := bytes.TrimSpace(line)
		switch {
		case len(text) == 0 || text[0] == '#':
			if bytes.ContainsRune(line, 0) {
				return false
			}
			continue
		case bytes.HasPrefix(text, []byte("version=1")), bytes.HasPrefix(text, []byte("version=2")), bytes.HasPrefix(text, []byte("version=3")):
			return true
		}
		return false
	}
	return false
}
