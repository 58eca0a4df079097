package qemu

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// maxStderr is how much of what QEMU wrote last to its standard error is kept, in bytes.
	maxStderr = 4 << 10
	// stderrDelay is how long the standard error of a process that has ended may stay open.
	stderrDelay = time.Second
)

// hypervisor is a QEMU process. It dies when its owner does.
type hypervisor struct {
	cmd    *exec.Cmd
	stderr tailWriter
	done   chan struct{} // closed when it has ended and was collected
	err    error         // how it ended; valid after done
}

// startProcess starts QEMU with files as its descriptors 3, 4, and so on.
func startProcess(binary string, args []string, files []*os.File) (*hypervisor, error) {
	h := &hypervisor{cmd: exec.Command(binary, args...), done: make(chan struct{})}
	h.cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	h.cmd.Dir = "/"
	h.cmd.Stderr = &h.stderr
	h.cmd.ExtraFiles = files
	h.cmd.WaitDelay = stderrDelay
	h.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true, // a signal for our terminal's group is not for the guest
		Pdeathsig: syscall.SIGKILL,
	}
	started := make(chan error)
	go func() {
		// The signal comes when the thread ends that has started the process, not when we do (prctl(2),
		// PR_SET_PDEATHSIG): that thread has to stay, and waits.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := h.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		h.err = h.cmd.Wait()
		close(h.done)
	}()
	if err := <-started; err != nil {
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("start %s: it is not there; install Debian's package qemu-system-x86: %w", binary, errdefs.ErrNotFound)
		}
		return nil, fmt.Errorf("start %s: %w", binary, err)
	}
	return h, nil
}

// kill ends the process whatever it is doing, and waits for that.
func (h *hypervisor) kill() {
	_ = h.cmd.Process.Kill() // an error says that it has ended
	<-h.done
}

// tailWriter keeps the last bytes that are written to it.
type tailWriter struct {
	mu   sync.Mutex
	kept []byte
}

var _ io.Writer = (*tailWriter)(nil)

func (t *tailWriter) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, b...)
	t.kept = t.kept[max(0, len(t.kept)-maxStderr):]
	return len(b), nil
}

func (t *tailWriter) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(Printable(string(t.kept)))
}
