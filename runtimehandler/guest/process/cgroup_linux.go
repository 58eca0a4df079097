package process

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// DefaultCgroups is where the guest's control groups (version 2) are mounted.
const DefaultCgroups = "/sys/fs/cgroup"

const (
	removePatience = 2 * time.Second // for what was killed to be gone
	removeStep     = 10 * time.Millisecond
)

// group is the control group of a container: what is started in it cannot leave it, and is killed with it (the kernel's
// Documentation/admin-guide/cgroup-v2.rst, cgroup.kill).
type group struct {
	dir string

	mu   sync.Mutex
	file *os.File // nil: removed
}

// newGroup makes a control group. ErrFailedPrecondition if there are none of version 2 at root.
func newGroup(root, name string) (*group, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("no control groups of version 2 are mounted at %s; containers need them: %w", root, errdefs.ErrFailedPrecondition)
	}
	dir := filepath.Join(root, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("control group: %w", err)
	}
	file, err := os.Open(dir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control group: %w", err), os.Remove(dir))
	}
	return &group{dir: dir, file: file}, nil
}

// use calls fn with the group's descriptor. ErrFailedPrecondition if the group was removed.
func (g *group) use(fn func(fd int) error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.file == nil {
		return fmt.Errorf("the container has ended: %w", errdefs.ErrFailedPrecondition)
	}
	return fn(int(g.file.Fd()))
}

// kill kills every process of the group, also one that is just being forked. A group that was removed has none.
func (g *group) kill() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.file == nil {
		return nil
	}
	if err := os.WriteFile(filepath.Join(g.dir, "cgroup.kill"), []byte("1"), 0); err != nil {
		return fmt.Errorf("kill control group: %w", err)
	}
	return nil
}

// remove kills what is left and removes the group. What does not die keeps it, as a directory without use.
func (g *group) remove() {
	_ = g.kill()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.file == nil {
		return
	}
	for deadline := time.Now().Add(removePatience); ; time.Sleep(removeStep) {
		if err := unix.Rmdir(g.dir); !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			break
		}
	}
	_ = g.file.Close()
	g.file = nil
}
