package guest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/device"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// volume is what is mounted, or about to be, at one mount path.
type volume struct {
	path string
	lock chan struct{} // holds one token while a call works on the volume
	refs int           // calls that have or want the lock; guarded by Agent.mu

	// mount is nil while nothing is mounted. It is set under both the lock and Agent.mu, so that either is enough to
	// read it; what it points to does not change.
	mount *mounted
	// leaving says that the mount is removed, and the device not yet free. Guarded by the lock.
	leaving bool
	// binds are where else the volume appears, in the order in which that came about. Guarded by the lock.
	binds []bind
	// root is what was mounted beneath it because it is a container's root filesystem; nil: it is none. Guarded by the
	// lock.
	root *root
	// made are the places that were made for mounts that are removed by now. Guarded by the lock.
	made []string

	// frozen has a mutex of its own: the thaw must never wait for a call that waits for the thaw.
	freezeMu sync.Mutex
	frozen   *frozen
}

// mounted is a volume's mount.
type mounted struct {
	order    int // of all mounts of this agent
	request  *guestv1.MountVolumeRequest
	response *guestv1.MountVolumeResponse
	device   device.Device
	writable bool
	made     bool // the directory was made for it
}

// bind is a place where a part of a volume appears.
type bind struct {
	subPath, destination string
	readOnly             bool
	made                 bool // the destination was made for it
}

// root is what makes a volume a container's root filesystem.
type root struct {
	request *guestv1.PrepareRootRequest
	mounts  []string // mount points, in the order in which they came about
}

// frozen is a freeze that ends by itself.
type frozen struct {
	fs    *filesystem.Frozen
	limit *time.Timer
}

// acquire returns the volume of a mount path, whether or not anything is mounted there, for the caller alone until it
// calls release.
func (a *Agent) acquire(ctx context.Context, path string) (v *volume, release func(), err error) {
	a.mu.Lock()
	if a.stopping {
		a.mu.Unlock()
		return nil, nil, fmt.Errorf("the guest is shutting down: %w", errdefs.ErrUnavailable)
	}
	v = a.volumes[path]
	if v == nil {
		v = &volume{path: path, lock: make(chan struct{}, 1)}
		a.volumes[path] = v
	}
	v.refs++
	a.mu.Unlock()
	select {
	case v.lock <- struct{}{}:
		return v, func() { <-v.lock; a.drop(v) }, nil
	case <-ctx.Done():
		a.drop(v)
		return nil, nil, fmt.Errorf("another call works on %s: %w", path, context.Cause(ctx))
	}
}

// drop forgets a volume that nobody wants and that has nothing.
func (a *Agent) drop(v *volume) {
	a.mu.Lock()
	defer a.mu.Unlock()
	v.refs--
	if v.refs == 0 && v.mount == nil {
		delete(a.volumes, v.path)
	}
}

// acquireMounted is acquire for a volume that has to be mounted. ErrNotFound if it is not.
func (a *Agent) acquireMounted(ctx context.Context, path string) (*volume, func(), error) {
	if err := checkPath("mount_path", path); err != nil {
		return nil, nil, err
	}
	v, release, err := a.acquire(ctx, path)
	if err != nil {
		return nil, nil, err
	}
	if v.mount == nil || v.leaving {
		release()
		return nil, nil, notMounted(path)
	}
	return v, release, nil
}

// mountedVolume returns the volume that is mounted at a path, and waits for nobody.
func (a *Agent) mountedVolume(path string) (*volume, error) {
	if err := checkPath("mount_path", path); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if v := a.volumes[path]; v != nil && v.mount != nil {
		return v, nil
	}
	return nil, notMounted(path)
}

// mountOf returns what is mounted at a path, and waits for nobody.
func (a *Agent) mountOf(path string) (*mounted, error) {
	v, err := a.mountedVolume(path)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if v.mount == nil {
		return nil, notMounted(path)
	}
	return v.mount, nil
}

func notMounted(path string) error {
	return fmt.Errorf("no volume is mounted at %s: %w", path, errdefs.ErrNotFound)
}

// reserve makes sure that a device has one mount path only: the kernel would mount it a second time, with the options of
// the first.
func (a *Agent) reserve(serial, path string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if other, ok := a.serials[serial]; ok && other != path {
		return fmt.Errorf("it is mounted at %s, or about to be; unmount it there first: %w", other, errdefs.ErrFailedPrecondition)
	}
	a.serials[serial] = path
	return nil
}

func (a *Agent) unreserve(serial string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.serials, serial)
}

// setMount notes that a volume is mounted.
func (a *Agent) setMount(v *volume, m *mounted) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mounts++
	m.order = a.mounts
	v.mount = m
}

// clearMount notes that a volume's device is free.
func (a *Agent) clearMount(v *volume) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.serials, v.mount.request.GetSerial())
	v.mount, v.leaving = nil, false
}

// newestFirst returns the volumes in the order in which they have to be taken down: the last mounted one first, and
// before it those that a call is working on.
func (a *Agent) newestFirst() []*volume {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := slices.Collect(maps.Values(a.volumes))
	order := func(v *volume) int {
		if v.mount == nil {
			return math.MaxInt
		}
		return v.mount.order
	}
	slices.SortFunc(list, func(x, y *volume) int { return cmp.Compare(order(y), order(x)) })
	return list
}
