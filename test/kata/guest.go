package kata

import (
	"fmt"
	"os"
	"sync"
)

// Volume is what a sandbox's agent is told to mount.
type Volume struct {
	Device   string // on the host
	FSType   string
	Options  []string
	ReadOnly bool   // the device is attached read-only
	Path     string // in the guest
}

// Usage is what statfs(2) says of a filesystem.
type Usage struct{ Total, Free, Inodes, FreeInodes int64 }

// Guest is the inside of a sandbox.
type Guest interface {
	Mount(v Volume) error
	Usage(v Volume) (Usage, error)
	// Resize makes the filesystem as large as its device.
	Resize(v Volume) error
	Stop()
}

// Memory is a guest that only counts: a filesystem takes a sixteenth of its device for itself, and a quarter is used.
type Memory struct {
	mu    sync.Mutex
	sizes map[string]int64 // by device
}

var _ Guest = (*Memory)(nil)

// Mount notes the size of the device, which a running guest does not see change.
func (m *Memory) Mount(v Volume) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.sizes[v.Device]; ok {
		return nil
	}
	return m.measure(v)
}

// Resize notes it again.
func (m *Memory) Resize(v Volume) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.measure(v)
}

func (m *Memory) measure(v Volume) error {
	info, err := os.Stat(v.Device)
	if err != nil {
		return err
	}
	if m.sizes == nil {
		m.sizes = map[string]int64{}
	}
	m.sizes[v.Device] = info.Size()
	return nil
}

// Usage is made up from the size.
func (m *Memory) Usage(v Volume) (Usage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	size, ok := m.sizes[v.Device]
	if !ok {
		return Usage{}, fmt.Errorf("%s is not mounted", v.Path)
	}
	total := size / 16 * 15
	return Usage{Total: total, Free: total / 4 * 3, Inodes: 1000, FreeInodes: 989}, nil
}

// Stop does nothing.
func (m *Memory) Stop() {}
