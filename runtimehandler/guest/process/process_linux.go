package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/command"
)

// lingerTime is how long a command that has ended may leave its pipes open, through a process that it has left in the
// background, before its output counts as complete.
const lingerTime = time.Second

// Spec is a command to run.
type Spec struct {
	Argv  []string
	Env   []string // NAME=value; on top of a PATH and a HOME
	Dir   string   // absolute; empty is /
	Stdin bool     // whether there is input; else it is empty
	// Container makes it one of a container's; then Env is all there is. Nil: it is one of the guest's.
	Container *Container
}

// Process is an open command.
type Process struct {
	ID  string
	PID int

	spec           Spec
	group          *group // of its container; nil: it is none of a container's
	cmd            *exec.Cmd
	stdin          *buffer // nil: none
	stdout, stderr *buffer
	exited         chan struct{} // closed when the first process has ended; code is valid then
	code           int
	pipes          []*os.File // our ends
	stop           context.CancelFunc
	closing        chan struct{} // closed when nobody wants it any more
	collected      chan struct{} // closed when everything of it is gone

	mu     sync.Mutex
	closed bool // closing is closed, and the number of the process may be somebody else's
}

// start starts a command, in a group if it has one. The goroutines that it starts end with [Process.end].
func start(ctx context.Context, s Spec, g *group) (*Process, error) {
	cmd, err := s.command()
	if err != nil {
		return nil, err
	}
	p := &Process{
		spec: s, group: g, cmd: cmd, stdout: newBuffer(), stderr: newBuffer(),
		exited: make(chan struct{}), closing: make(chan struct{}), collected: make(chan struct{}),
	}
	theirs, err := p.openPipes(s.Stdin)
	defer closeAll(theirs)
	if err != nil {
		closeAll(p.pipes)
		return nil, fmt.Errorf("start %q: %w", s.Argv, err)
	}
	launch := cmd.Start
	if g != nil {
		launch = func() error { return g.startIn(cmd) }
	}
	if err := launch(); err != nil {
		closeAll(p.pipes)
		return nil, startError(s, err)
	}
	p.PID = cmd.Process.Pid
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx)) // it outlives the call that started it
	p.stop = stop
	go p.stdout.fill(ctx, p.pipes[0])
	go p.stderr.fill(ctx, p.pipes[1])
	if s.Stdin {
		p.stdin = newBuffer()
		go p.stdin.drain(ctx, p.pipes[2])
	}
	go p.watch()
	return p, nil
}

func (s Spec) command() (*exec.Cmd, error) {
	if s.Container != nil {
		return s.containerCommand()
	}
	env := append([]string{"PATH=" + command.Path, "HOME=/root"}, s.Env...)
	dir := s.Dir
	if dir == "" {
		dir = "/"
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("working directory %s does not exist: %w", dir, errdefs.ErrNotFound)
	}
	program, err := lookPath(s.Argv[0], dir, env)
	if err != nil {
		return nil, err
	}
	return &exec.Cmd{
		Path:        program,
		Args:        s.Argv,
		Env:         env,
		Dir:         dir,
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true},
	}, nil
}

// lookPath finds a program as a shell would: with a slash in its name from the working directory, else in PATH.
func lookPath(name, dir string, env []string) (string, error) {
	dirs := []string{dir}
	if !strings.Contains(name, "/") {
		for _, e := range env {
			if list, ok := strings.CutPrefix(e, "PATH="); ok {
				dirs = filepath.SplitList(list) // the last one counts
			}
		}
	}
	for _, d := range dirs {
		path := name
		if !filepath.IsAbs(name) {
			path = filepath.Join(d, name)
		}
		if info, err := os.Stat(path); err == nil && !info.IsDir() && info.Mode().Perm()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("program %q is not there, or is not executable (PATH=%s): %w", name, strings.Join(dirs, ":"), errdefs.ErrNotFound)
}

func startError(s Spec, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT): // the interpreter of a script or of a dynamic program
		return fmt.Errorf("start %q: %w: %w", s.Argv, err, errdefs.ErrNotFound)
	case errors.Is(err, unix.ENOEXEC), errors.Is(err, unix.E2BIG):
		return fmt.Errorf("start %q: %w: %w", s.Argv, err, errdefs.ErrInvalidArgument)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("start %q: %w: %w", s.Argv, err, errdefs.ErrResourceExhausted)
	}
	return fmt.Errorf("start %q: %w", s.Argv, err)
}

// openPipes gives the command its standard files; what it returns are the command's ends.
func (p *Process) openPipes(stdin bool) (theirs []*os.File, err error) {
	pipe := func() (r, w *os.File) {
		if err == nil {
			r, w, err = os.Pipe()
		}
		return r, w
	}
	outR, outW := pipe()
	errR, errW := pipe()
	p.pipes, theirs = []*os.File{outR, errR}, []*os.File{outW, errW}
	p.cmd.Stdout, p.cmd.Stderr = outW, errW
	if stdin {
		inR, inW := pipe()
		p.pipes, theirs = append(p.pipes, inW), append(theirs, inR)
		p.cmd.Stdin = inR
	}
	return theirs, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // a nil file says so and does nothing
	}
}

// watch waits for the first process to end, and collects it when nobody wants it any more.
func (p *Process) watch() {
	p.code = waitExit(p.PID)
	if p.first() {
		_ = p.group.kill() // the container ends with its first process
	}
	close(p.exited)
	select {
	case <-time.After(lingerTime):
		closeAll(p.pipes)
	case <-p.closing:
	}
	<-p.closing
	_ = p.cmd.Wait() // its exit code is known; its number is free from here on
	p.stop()
	closeAll(p.pipes)
	if p.first() {
		p.group.remove()
	}
	close(p.collected)
}

// first says whether this is the first command of a container.
func (p *Process) first() bool { return p.group != nil && p.spec.Container.Join == "" }

// Read returns output, and waits for some, or for the end, until ctx ends. exited says that the command has ended and
// that this was the last of its output.
func (p *Process) Read(ctx context.Context) (stdout, stderr []byte, exited bool, code int) {
	for {
		var outEnd, errEnd bool
		var outChanged, errChanged <-chan struct{}
		stdout, outEnd, outChanged = p.stdout.take(MaxChunk)
		stderr, errEnd, errChanged = p.stderr.take(MaxChunk)
		hasExited := closedNow(p.exited)
		if hasExited && outEnd && errEnd {
			return stdout, stderr, true, p.code
		}
		if len(stdout) > 0 || len(stderr) > 0 {
			return stdout, stderr, false, 0
		}
		exit := p.exited
		if hasExited {
			exit = nil // only the rest of the output is of interest
		}
		select {
		case <-ctx.Done():
			return nil, nil, false, 0
		case <-outChanged:
		case <-errChanged:
		case <-exit:
		}
	}
}

func closedNow(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Write hands input over, all of it or none, and waits until there is room for it. ErrFailedPrecondition if the command
// takes no input, or no more; ErrUnavailable if it does not read in time. The end alone needs no room and nobody who reads.
func (p *Process) Write(ctx context.Context, data []byte, last bool) error {
	if p.stdin == nil {
		return fmt.Errorf("command %s was started without input: %w", p.ID, errdefs.ErrFailedPrecondition)
	}
	onlyEnd := len(data) == 0 && last
	if !onlyEnd && !p.stdin.room(ctx, len(data)) {
		if ctx.Err() != nil {
			return fmt.Errorf("command %s does not read its input; nothing of this was handed over: %w", p.ID, errdefs.ErrUnavailable)
		}
		return fmt.Errorf("command %s reads no more input: %w", p.ID, errdefs.ErrFailedPrecondition)
	}
	closed := false
	p.stdin.update(func() {
		if closed = p.stdin.ended; closed {
			return
		}
		p.stdin.data = append(p.stdin.data, data...)
		p.stdin.ended = last
	})
	if closed && !onlyEnd {
		return fmt.Errorf("the input of command %s was closed: %w", p.ID, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// KillAll kills every process of the container whose first command this is. ErrFailedPrecondition if it is another's.
func (p *Process) KillAll() error {
	if !p.first() {
		return fmt.Errorf("command %s is not the first of a container: %w", p.ID, errdefs.ErrFailedPrecondition)
	}
	return p.group.kill()
}

// Signal sends a signal to the command's process group, or, in a container, to the command alone. What has ended takes no
// notice.
func (p *Process) Signal(sig unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	to := -p.PID
	if p.group != nil {
		to = p.PID
	}
	if err := unix.Kill(to, sig); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal command %s: %w", p.ID, err)
	}
	return nil
}

// end kills the process group and waits until the first process is collected. ErrUnavailable if it does not die before
// ctx ends: it waits in the kernel for a device, or for a frozen filesystem. It is collected whenever it does die.
func (p *Process) end(ctx context.Context) error {
	err := p.Signal(unix.SIGKILL)
	if p.first() {
		err = p.group.kill()
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.closing)
	}
	p.mu.Unlock()
	select {
	case <-p.collected:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("command %s (pid %d) does not die; it waits for a device or a frozen filesystem: %w", p.ID, p.PID, errdefs.ErrUnavailable)
	}
}
