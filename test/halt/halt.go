// Package halt has a process stand still, as one that hangs does.
package halt

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// timeout is how long a process may take to stand still.
const timeout = time.Minute

// Process stops a process until the function that it returns is called, which may be more than once, or the test ends. It
// returns when all threads of the process have stopped: they do so one after the other, and what still runs may still answer.
func Process(t testing.TB, pid int) (goOn func()) {
	t.Helper()
	goOn = sync.OnceFunc(func() { _ = unix.Kill(pid, unix.SIGCONT) })
	t.Cleanup(goOn)
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatalf("stop process %d: %v", pid, err)
	}
	deadline := time.Now().Add(timeout)
	for err := running(pid); err != nil; err = running(pid) {
		if time.Now().After(deadline) {
			t.Fatalf("stop process %d: %v", pid, err)
		}
		time.Sleep(time.Millisecond)
	}
	return goOn
}

// running is an error as long as a thread of the process is not stopped.
func running(pid int) error {
	threads, err := procfs.AllThreads(pid)
	if err != nil {
		return err
	}
	for _, thread := range threads {
		stat, err := thread.Stat()
		if err != nil {
			return err // it has just ended, or is about to
		}
		if stat.State != "T" {
			return fmt.Errorf("thread %d is in state %s", thread.PID, stat.State)
		}
	}
	return nil
}
