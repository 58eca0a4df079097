package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// DefaultRoot is where the directories of sandboxes are.
const DefaultRoot = "/run/crust/sandboxes"

const (
	lockName    = "lock"
	stateName   = "state.json"
	controlName = "control.sock"
	vmName      = "vm" // the machine's own files
)

// validID is what the daemon takes as sandbox id.
var validID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)

// Info is what a sandbox says of itself in its directory.
type Info struct {
	ID      string    `json:"id"`
	PID     int       `json:"pid"`
	VMMPID  int       `json:"vmmPid,omitempty"`
	Started time.Time `json:"started"`
	// Accel is "kvm" or "tcg".
	Accel string `json:"accel,omitempty"`
	// Ready is set when all mounts are in place.
	Ready bool `json:"ready"`
	// Alive says whether its process still runs. It is not stored.
	Alive bool `json:"alive"`
}

// directory is the directory of one sandbox.
type directory struct {
	path string
	lock *os.File
}

// claimDirectory makes and locks a sandbox's directory. What a dead process has left in it is removed.
// ErrAlreadyExists if a living one has it.
func claimDirectory(root, id string) (_ *directory, err error) {
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	path := filepath.Join(root, id)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	lock, err := os.OpenFile(filepath.Join(path, lockName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	d := &directory{path: path, lock: lock}
	if err := d.acquire(); err != nil {
		_ = lock.Close()
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	if err := d.empty(); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return d, nil
}

// acquire takes the lock, if the file that it is on is still the one in the directory: its last owner removes it.
func (d *directory) acquire() error {
	err := unix.Flock(int(d.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("it runs already; stop it or choose another id: %w", errdefs.ErrAlreadyExists)
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	ours, err := d.lock.Stat()
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	there, err := os.Stat(d.file(lockName))
	if err != nil || !os.SameFile(ours, there) {
		return fmt.Errorf("another process has just ended it; try again: %w", errdefs.ErrUnavailable)
	}
	return nil
}

func (d *directory) file(name string) string { return filepath.Join(d.path, name) }

// empty removes everything but the lock.
func (d *directory) empty() error {
	for _, name := range []string{stateName, controlName, vmName} {
		// Nothing is ever mounted in there.
		if err := os.RemoveAll(d.file(name)); err != nil {
			return fmt.Errorf("sandbox directory: %w", err)
		}
	}
	return nil
}

// remove removes the directory and then lets go of the lock.
func (d *directory) remove() error {
	return errors.Join(d.empty(), os.Remove(d.file(lockName)), os.Remove(d.path), d.lock.Close())
}

// write publishes what the sandbox says of itself.
func (d *directory) write(info Info) error {
	raw, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("sandbox state: %w", err)
	}
	tmp := d.file("." + stateName)
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return fmt.Errorf("sandbox state: %w", err)
	}
	if err := os.Rename(tmp, d.file(stateName)); err != nil {
		return fmt.Errorf("sandbox state: %w", err)
	}
	return nil
}

// Read returns what a sandbox says of itself. ErrNotFound if there is no such sandbox.
func Read(root, id string) (Info, error) {
	if !validID.MatchString(id) {
		return Info{}, fmt.Errorf("sandbox id %q: want %s: %w", id, validID, errdefs.ErrInvalidArgument)
	}
	path := filepath.Join(root, id)
	lock, err := os.Open(filepath.Join(path, lockName))
	if errors.Is(err, os.ErrNotExist) {
		return Info{}, fmt.Errorf("no sandbox %s; see crust-sandbox list: %w", id, errdefs.ErrNotFound)
	}
	if err != nil {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, err)
	}
	defer lock.Close()
	info := Info{ID: id}
	raw, err := os.ReadFile(filepath.Join(path, stateName))
	if err == nil {
		err = json.Unmarshal(raw, &info)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, err)
	}
	// Whoever lives holds the lock; it is given back at once if it was free.
	info.Alive = errors.Is(unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
	return info, nil
}

// List returns all sandboxes under a root, dead ones included, sorted by id.
func List(root string) ([]Info, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("sandboxes: %w", err)
	}
	var infos []Info
	for _, e := range entries {
		info, err := Read(root, e.Name())
		if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrInvalidArgument) {
			continue // on its way in or out, or not ours
		}
		if err != nil {
			return nil, err
		}
		infos = append(infos, info)
	}
	return infos, nil
}
