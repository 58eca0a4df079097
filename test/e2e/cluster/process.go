package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// stopTimeout is how long a process may take to end before it is killed.
const stopTimeout = 30 * time.Second

// Process is a program of the cluster. It can be stopped, killed and started again.
type Process struct {
	Name string

	dir  string
	argv []string
	env  []string
	keep bool // it is started again when it ends, as a kubelet does with a container

	mu      sync.Mutex
	stopped bool // nobody starts it again
	cmd     *exec.Cmd
	done    chan struct{} // closed when the command has ended
	err     error         // how; valid after done
}

// start starts a program, whose output goes to a log.
func (c *Cluster) start(name string, env []string, argv ...string) (*Process, error) {
	p := &Process{Name: name, dir: c.Dir, argv: argv, env: env}
	c.processes = append(c.processes, p)
	return p, p.Start()
}

// startKept is start for a program that is started again when it ends: sidecars end themselves when their driver does.
func (c *Cluster) startKept(name string, env []string, argv ...string) (*Process, error) {
	p := &Process{Name: name, dir: c.Dir, argv: argv, env: env, keep: true}
	c.processes = append(c.processes, p)
	return p, p.Start()
}

// Log is the file with the output.
func (p *Process) Log() string { return filepath.Join(p.dir, "logs", p.Name+".log") }

// Start starts the program, again if it has ended, this time with more arguments than its own.
func (p *Process) Start(more ...string) error {
	log, err := os.OpenFile(p.Log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return nil
	}
	cmd := exec.Command(p.argv[0], slices.Concat(p.argv[1:], more)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), p.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(done)
		if p.keep {
			time.Sleep(time.Second)
			_ = p.Start() // its log says why it does not stay
		}
	}()
	return nil
}

// Kill ends the program as a crash would.
func (p *Process) Kill() {
	p.mu.Lock()
	cmd, done := p.cmd, p.done
	p.mu.Unlock()
	_ = cmd.Process.Kill()
	<-done
}

// Stop asks the program to end, for good, and waits for it.
func (p *Process) Stop() error {
	p.mu.Lock()
	p.stopped = true
	cmd, done := p.cmd, p.done
	p.mu.Unlock()
	if cmd == nil {
		return nil
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.Name, err)
	}
	select {
	case <-done:
		return nil
	case <-time.After(stopTimeout):
		p.Kill()
		return fmt.Errorf("%s did not end within %v and was killed; see %s", p.Name, stopTimeout, p.Log())
	}
}

// await waits until check succeeds, or the program ends, or ctx does.
func (p *Process) await(ctx context.Context, check func(context.Context) error) error {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-done:
			return fmt.Errorf("%s has ended (%v); see %s", p.Name, p.err, p.Log())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; see %s", p.Name, err, p.Log())
		case <-time.After(200 * time.Millisecond):
		}
	}
}
