package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

// settle is how long what ends by itself may take to be gone.
const settle = 10 * time.Second

// Main runs a package's tests and returns the exit code: that of the tests, or 1 if they have left behind a process, a
// mount, a loop device or a goroutine.
func Main(m *testing.M) int {
	goroutines := runtime.NumGoroutine()
	code := m.Run()
	if code != 0 {
		return code // what failed has its reasons to leave things behind
	}
	for name, left := range map[string]func() []string{
		"processes":    children,
		"mounts":       mounts,
		"loop devices": loops,
		"goroutines":   func() []string { return extraGoroutines(goroutines) },
	} {
		if list := eventuallyNone(left); len(list) > 0 {
			fmt.Fprintf(os.Stderr, "left behind: %s:\n%s\n", name, strings.Join(list, "\n"))
			code = 1
		}
	}
	return code
}

func eventuallyNone(left func() []string) []string {
	deadline := time.Now().Add(settle)
	for {
		list := left()
		if len(list) == 0 || time.Now().After(deadline) {
			return list
		}
		time.Sleep(10 * time.Millisecond) // it ends by itself, and nothing tells when
	}
}

// children are the processes that we have started.
func children() []string {
	var list []string
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		// pid (name) state ppid; the name may have anything in it
		_, rest, _ := strings.Cut(string(raw), ") ")
		if fields := strings.Fields(rest); len(fields) > 1 && fields[1] == strconv.Itoa(os.Getpid()) {
			list = append(list, string(raw))
		}
	}
	return list
}

// mounts are those below our directories. There may be others on the machine that are not ours.
func mounts() []string {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	return linesWith(string(raw), dirPrefix())
}

// loops are those of files in our directories.
func loops() []string {
	var list []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range files {
		if raw, err := os.ReadFile(path); err == nil && strings.Contains(string(raw), dirPrefix()) {
			list = append(list, path+" "+strings.TrimSpace(string(raw)))
		}
	}
	return list
}

func linesWith(text, part string) []string {
	var list []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, part) {
			list = append(list, strings.TrimSpace(line))
		}
	}
	return list
}

func extraGoroutines(before int) []string {
	if runtime.NumGoroutine() <= before {
		return nil
	}
	buf := make([]byte, 1<<20)
	return []string{string(buf[:runtime.Stack(buf, true)])}
}
