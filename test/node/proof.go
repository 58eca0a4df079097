package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Witness watches the host's mounts and loop devices all the while: a mount that comes and goes is seen too.
type Witness struct {
	mu   sync.Mutex
	seen map[string]bool
	err  error
	stop context.CancelFunc
	done chan struct{}
}

// samples is how often loop devices are looked at; of mounts the kernel tells.
const sampleInterval = 25 * time.Millisecond

// Watch begins after the pool has been set up: what is there then is no volume's.
func Watch() (*Witness, error) {
	ctx, cancel := context.WithCancel(context.Background())
	w := &Witness{seen: map[string]bool{}, stop: cancel, done: make(chan struct{})}
	before, err := hostStorage()
	if err != nil {
		cancel()
		return nil, err
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		cancel()
		return nil, err
	}
	go func() {
		defer close(w.done)
		defer mounts.Close()
		for ctx.Err() == nil {
			w.look(before)
			// The kernel wakes up a poller when a mount comes or goes (proc(5)).
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(mounts.Fd()), Events: unix.POLLPRI}}, int(sampleInterval.Milliseconds()))
			if err != nil && !errors.Is(err, unix.EINTR) {
				w.fail(err)
				return
			}
		}
	}()
	return w, nil
}

func (w *Witness) look(before []string) {
	now, err := hostStorage()
	if err != nil {
		w.fail(err)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, entry := range now {
		if !slices.Contains(before, entry) {
			w.seen[entry] = true
		}
	}
}

func (w *Witness) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = errors.Join(w.err, err)
}

// Close ends it.
func (w *Witness) Close() {
	w.stop()
	<-w.done
}

// Verdict is an error if the host has mounted or looped anything that the volume, or a path in dir, is part of. The
// seals of target paths are crustd's own and hold nothing.
func (w *Witness) Verdict(dir string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	for entry := range w.seen {
		if strings.Contains(entry, dir) && !strings.Contains(entry, " - bpf crust-seal ") {
			return fmt.Errorf("the host has it: %s", entry)
		}
	}
	return nil
}

// hostStorage lists the host's mounts and the files behind its loop devices.
func hostStorage() ([]string, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var list []string
	for line := range strings.Lines(string(raw)) {
		list = append(list, "mount "+strings.TrimSpace(line))
	}
	backing, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, attr := range backing {
		file, err := os.ReadFile(attr)
		if err != nil {
			continue // detached meanwhile
		}
		list = append(list, fmt.Sprintf("loop %s %s", strings.Split(attr, "/")[3], strings.TrimSpace(string(file))))
	}
	slices.Sort(list)
	return list, nil
}

// Leftovers is an error if a process, a mount or a loop device is still there that names a directory.
func Leftovers(dir string) error {
	entries, err := hostStorage()
	if err != nil {
		return err
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, path := range commands {
		raw, err := os.ReadFile(path)
		if err != nil || strings.Split(path, "/")[2] == strconv.Itoa(os.Getpid()) {
			continue // ended meanwhile, or ourselves
		}
		entries = append(entries, "process "+strings.Split(path, "/")[2]+" "+strings.ReplaceAll(string(raw), "\x00", " "))
	}
	for _, entry := range entries {
		if strings.Contains(entry, dir) {
			return fmt.Errorf("left behind: %.200s", entry)
		}
	}
	return nil
}
