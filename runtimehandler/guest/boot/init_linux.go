package boot

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/modules"
)

// syncTimeout bounds the last sync: a filesystem that hangs must not keep the machine from going off.
const syncTimeout = 10 * time.Second

// Config is what process 1 is told on the kernel's command line.
type Config struct {
	// Modules has the kernel modules to load.
	Modules modules.Dir
	// Program is what runs the guest, usually ourselves, and Args its arguments, the first being its name.
	Program string
	Args    []string
	Env     []string
}

// Run does the work of process 1 and powers the machine off. It returns only an error of the very last step.
func Run(c Config) error {
	if err := prepare(c); err != nil {
		slog.Error("the guest cannot start", "error", err)
	} else if err := superviseAgent(c); err != nil {
		slog.Error("the agent has ended", "error", err)
	}
	flush()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		return fmt.Errorf("power off: %w", err)
	}
	return nil
}

func prepare(c Config) error {
	unix.Umask(0o022)
	if err := mountBasics(); err != nil {
		return err
	}
	if err := openConsole(); err != nil {
		return err
	}
	return c.Modules.LoadForBoot()
}

// superviseAgent starts the agent and collects every process that ends, until the agent does.
func superviseAgent(c Config) error {
	agent, err := syscall.ForkExec(c.Program, c.Args, &syscall.ProcAttr{
		Dir:   "/",
		Env:   c.Env,
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", c.Program, err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait: %w", err)
		case pid == agent && status.Signaled():
			return fmt.Errorf("signal %v", status.Signal())
		case pid == agent && status.ExitStatus() != 0:
			return fmt.Errorf("exit code %d", status.ExitStatus())
		case pid == agent:
			return nil
		}
	}
}

// flush ends all other processes and writes to disk what can be written.
func flush() {
	// Process 1 itself is spared by the kernel (kill(2)).
	if err := unix.Kill(-1, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		slog.Warn("end all processes", "error", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		unix.Sync()
	}()
	select {
	case <-done:
	case <-time.After(syncTimeout):
		slog.Warn("a filesystem does not take its data; what was not synced is lost")
	}
}

// InitPID is the process id under which the kernel starts a guest's first program.
const InitPID = 1

// IsInit says whether this process is process 1.
func IsInit() bool { return os.Getpid() == InitPID }
