// Tool runs inside guests, for tests: what a workload does to a filesystem, and what no ordinary command can do.
package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "tool: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: tool write|verify|hold|shutdown|insmod|randread|seqread PATH")
	}
	path := args[1]
	switch args[0] {
	case "write":
		return write(path)
	case "verify":
		return verify(path)
	case "hold":
		return hold(path)
	case "shutdown":
		return shutdown(path)
	case "insmod":
		return insmod(path)
	case "randread":
		return read(path, 4<<10, true, args[2:])
	case "seqread":
		return read(path, 1<<20, false, args[2:])
	}
	return fmt.Errorf("unknown command %q", args[0])
}

// recordBytes is the size of a record: its number, random bytes, and a checksum over both.
const recordBytes = 4096

// write appends numbered records without end. The number of each is printed when it is on the disk.
func write(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	record := make([]byte, recordBytes)
	for n := uint64(1); ; n++ {
		binary.LittleEndian.PutUint64(record, n)
		for i := 8; i < recordBytes-8; i += 8 {
			binary.LittleEndian.PutUint64(record[i:], rand.Uint64())
		}
		binary.LittleEndian.PutUint32(record[recordBytes-4:], crc32.ChecksumIEEE(record[:recordBytes-4]))
		if _, err := f.Write(record); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		fmt.Println(n)
	}
}

// verify prints the number of the last record up to which all are whole.
func verify(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewReader(f)
	record := make([]byte, recordBytes)
	last := uint64(0)
	for {
		if _, err := io.ReadFull(in, record); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		} else if err != nil {
			return err
		}
		sum := binary.LittleEndian.Uint32(record[recordBytes-4:])
		if binary.LittleEndian.Uint64(record) != last+1 || sum != crc32.ChecksumIEEE(record[:recordBytes-4]) {
			break
		}
		last++
	}
	fmt.Println(last)
	return nil
}

// hold keeps a file open until it is killed.
func hold(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	fmt.Println("held")
	_, err = io.Copy(io.Discard, blocked{})
	return err
}

// blocked is a reader that never returns.
type blocked struct{}

func (blocked) Read([]byte) (int, error) {
	time.Sleep(24 * time.Hour)
	return 0, io.EOF
}

// shutdown stops a filesystem as an error of its device would (XFS_IOC_GOINGDOWN, which ext4 has, too).
func shutdown(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	const goingDown, noLogFlush = 0x8004587d, 2
	flags := uint32(noLogFlush)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), goingDown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return errno
	}
	return nil
}

// insmod loads a kernel module.
func insmod(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.FinitModule(int(f.Fd()), "", 0)
}

// read reads a device or file past the cache for some seconds and prints how many bytes that were per second.
func read(path string, chunk int, random bool, args []string) error {
	seconds := 2
	if len(args) > 0 {
		var err error
		if seconds, err = strconv.Atoi(args[0]); err != nil {
			return err
		}
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	buf, err := unix.Mmap(-1, 0, chunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		return err
	}
	chunks := size / int64(chunk)
	total, start := int64(0), time.Now()
	for i := int64(0); time.Since(start) < time.Duration(seconds)*time.Second; i++ {
		at := i % chunks
		if random {
			at = rand.Int64N(chunks)
		}
		n, err := f.ReadAt(buf, at*int64(chunk))
		if err != nil {
			return err
		}
		total += int64(n)
	}
	fmt.Println(int64(float64(total) / time.Since(start).Seconds()))
	return nil
}
