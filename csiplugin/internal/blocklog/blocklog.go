// Package blocklog is a disk that remembers every write and every flush in their order, so that a test can see what a power
// cut would have left at any of them. It is what dm-log-writes is, without a device mapper: a file in a FUSE filesystem of
// the test's own, which a loop device makes a disk of. Nothing but tests imports it.
package blocklog

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/internal/scratch"
)

// entry is a write, or a flush if it has no data.
type entry struct {
	offset int64
	data   []byte
}

// Disk is a disk that remembers.
type Disk struct {
	// Path is the file that it can be attached by.
	Path string

	base string // what it was before the first write
	file *os.File

	mu  sync.Mutex
	log []entry
}

// New makes a disk with the content of an image, which must be in a filesystem with reflinks and must not change from
// here on. It goes when the test ends; what uses it has to be gone by then.
func New(t testing.TB, image string) *Disk {
	t.Helper()
	d := &Disk{base: image}
	current := image + ".current"
	clone(t, image, current)
	var err error
	if d.file, err = os.OpenFile(current, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	dir := scratch.Dir(t)
	server, err := fs.Mount(dir, &root{disk: d}, &fs.Options{MountOptions: fuse.MountOptions{DirectMount: true, FsName: "blocklog", MaxWrite: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
		_ = d.file.Close()
	})
	d.Path = filepath.Join(dir, "disk")
	return d
}

func clone(t testing.TB, from, to string) {
	t.Helper()
	scratch.Run(t, "cp", "--reflink=always", from, to)
}

// Len is how many writes and flushes there were.
func (d *Disk) Len() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.log)
}

// Cut makes an image of what a power cut after the first n writes and flushes may have left. All is there that was written
// before the last flush; of the writes since, those that lost returns false for.
func (d *Disk) Cut(t testing.TB, n int, image string, lost func() bool) {
	t.Helper()
	clone(t, d.base, image)
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	flushed := 0
	for i, e := range d.log[:n] {
		if e.data == nil {
			flushed = i
		}
	}
	for i, e := range d.log[:n] {
		if e.data == nil || i > flushed && lost() {
			continue
		}
		if _, err := f.WriteAt(e.data, e.offset); err != nil {
			t.Fatal(err)
		}
	}
}

// Nothing of what was written is lost: the disk writes in order.
func Nothing() bool { return false }

// Some returns what loses every other write or so.
func Some(r *rand.Rand) func() bool { return func() bool { return r.IntN(2) == 0 } }

// root is the directory, which has the one file.
type root struct {
	fs.Inode
	disk *Disk
}

func (r *root) OnAdd(ctx context.Context) {
	child := r.NewPersistentInode(ctx, &node{disk: r.disk}, fs.StableAttr{Mode: syscall.S_IFREG})
	r.AddChild("disk", child, true)
}

// node is the file.
type node struct {
	fs.Inode
	disk *Disk
}

var (
	_ fs.NodeOnAdder   = (*root)(nil)
	_ fs.NodeGetattrer = (*node)(nil)
	_ fs.NodeOpener    = (*node)(nil)
	_ fs.NodeReader    = (*node)(nil)
	_ fs.NodeWriter    = (*node)(nil)
	_ fs.NodeFsyncer   = (*node)(nil)
	_ fs.NodeFlusher   = (*node)(nil)
)

func (n *node) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	var st unix.Stat_t
	if err := unix.Fstat(int(n.disk.file.Fd()), &st); err != nil {
		return fs.ToErrno(err)
	}
	out.Mode, out.Size, out.Nlink = unix.S_IFREG|0o600, uint64(st.Size), 1
	return 0
}

func (n *node) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, 0
}

func (n *node) Read(_ context.Context, _ fs.FileHandle, dest []byte, offset int64) (fuse.ReadResult, syscall.Errno) {
	return fuse.ReadResultFd(n.disk.file.Fd(), offset, len(dest)), 0
}

func (n *node) Write(_ context.Context, _ fs.FileHandle, data []byte, offset int64) (uint32, syscall.Errno) {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	if _, err := n.disk.file.WriteAt(data, offset); err != nil {
		return 0, fs.ToErrno(err)
	}
	n.disk.log = append(n.disk.log, entry{offset, append(make([]byte, 0, len(data)), data...)})
	return uint32(len(data)), 0
}

func (n *node) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	n.disk.mu.Lock()
	defer n.disk.mu.Unlock()
	n.disk.log = append(n.disk.log, entry{})
	return 0
}

func (n *node) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }
