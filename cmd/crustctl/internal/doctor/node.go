package doctor

import (
	"errors"
	"fmt"
	"io"
	"os"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
)

// maxFile is how much of a file is read, in bytes.
const maxFile = 1 << 20

// at returns where a path of the node is for us. Symbolic links in it are followed as the node would.
func (n *Node) at(path string) string {
	real, err := securejoin.SecureJoin(n.Root, path)
	if err != nil {
		return n.Root + path // it will not be found there either, and the error of that says more
	}
	return real
}

func (n *Node) stat(path string) (os.FileInfo, error) { return os.Stat(n.at(path)) }

func (n *Node) read(path string) ([]byte, error) {
	// Others put files where doctor looks; a named pipe among them must not have it wait for a writer.
	f, err := os.OpenFile(n.at(path), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", path))
	}
	return io.ReadAll(io.LimitReader(f, maxFile))
}

// Filesystem is the fill level and the kind of a filesystem.
type Filesystem struct {
	FreeBytes  int64 // for root
	FreeInodes int64 // -1 if the filesystem does not count them
	InMemory   bool  // gone at a reboot
}

// Statfs measures with statfs(2).
func Statfs(path string) (Filesystem, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Filesystem{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	fs := Filesystem{
		FreeBytes:  int64(st.Bfree) * st.Bsize,
		FreeInodes: int64(st.Ffree),
		InMemory:   st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC,
	}
	if st.Files == 0 {
		fs.FreeInodes = -1
	}
	return fs, nil
}
