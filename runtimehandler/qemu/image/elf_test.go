package image

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// moduleELF makes the least that debug/elf takes for a kernel module with these lines of .modinfo.
func moduleELF(t testing.TB, modinfo ...string) []byte {
	t.Helper()
	info := strings.Join(modinfo, "\x00") + "\x00"
	names := "\x00.modinfo\x00.shstrtab\x00"
	const headerBytes, sectionBytes = 64, 64
	header := elf.Header64{
		Ident:     [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:      uint16(elf.ET_REL),
		Machine:   uint16(elf.EM_X86_64),
		Version:   uint32(elf.EV_CURRENT),
		Shoff:     uint64(headerBytes + len(info) + len(names)),
		Ehsize:    headerBytes,
		Shentsize: sectionBytes,
		Shnum:     3,
		Shstrndx:  2,
	}
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: headerBytes, Size: uint64(len(info))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: uint64(headerBytes + len(info)), Size: uint64(len(names))},
	}
	var b bytes.Buffer
	for _, part := range []any{header, []byte(info), []byte(names), sections} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// write makes files under a directory.
func write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}
