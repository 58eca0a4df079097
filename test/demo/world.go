package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"crust.dev/crust/protocol/rpc"
)

// stopTimeout is how long a process may take to end before it is killed.
const stopTimeout = 30 * time.Second

// world is what the demo starts: the driver, the daemon and sandboxes, all in one directory.
type world struct {
	bin, dir  string
	processes []*process
	services  int       // how many of the processes are the driver and the daemon
	volumes   []*volume // that may have to be given back
	conn      *grpc.ClientConn
}

// process is one that the demo has started, in a process group of its own so that a Ctrl-C does not reach it past us.
type process struct {
	name string
	cmd  *exec.Cmd
	log  *os.File
	done chan struct{}
	err  error
}

func newWorld(bin, dir string) (*world, error) {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return nil, err
	}
	w := &world{bin: bin}
	if w.dir, err = os.MkdirTemp(dir, "crust-demo-"); err != nil {
		return nil, err
	}
	for _, sub := range []string{"logs", "pool", "staging", "pods"} {
		if err := os.Mkdir(w.path(sub), 0o750); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w *world) path(elem ...string) string {
	return filepath.Join(append([]string{w.dir}, elem...)...)
}

// start starts a process with its output in a log. stdout may be nil.
func (w *world) start(name string, stdout *os.File, command string, args ...string) (*process, error) {
	log, err := os.Create(w.path("logs", name+".log"))
	if err != nil {
		return nil, err
	}
	p := &process{name: name, log: log, done: make(chan struct{}), cmd: exec.Command(filepath.Join(w.bin, command), args...)}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	go func() {
		p.err = p.cmd.Wait()
		_ = log.Close()
		close(p.done)
	}()
	w.processes = append(w.processes, p)
	return p, nil
}

// stop asks a process to end, and waits for it.
func (p *process) stop() error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("%s did not end within %v and was killed; see %s", p.name, stopTimeout, p.log.Name())
	}
}

func (p *process) ended() error {
	if p.err != nil {
		return fmt.Errorf("%s: %w; see %s", p.name, p.err, p.log.Name())
	}
	return nil
}

// close stops everything, the youngest first: sandboxes, then, when their volumes were given back, the services.
func (w *world) close() error {
	var errs []error
	for i := len(w.processes) - 1; i >= w.services; i-- {
		errs = append(errs, w.processes[i].stop())
	}
	errs = append(errs, w.giveBack())
	if w.conn != nil {
		errs = append(errs, w.conn.Close())
	}
	for i := min(w.services, len(w.processes)) - 1; i >= 0; i-- {
		errs = append(errs, w.processes[i].stop())
	}
	return errors.Join(errs...)
}

// ended says how the services have ended.
func (w *world) ended() error {
	var errs []error
	for _, p := range w.processes[:w.services] {
		errs = append(errs, p.ended())
	}
	return errors.Join(errs...)
}

// removeFiles removes the directory of the demo: with the logs unless they are to be kept.
func (w *world) removeFiles(keep bool) error {
	if keep {
		return nil
	}
	return os.RemoveAll(w.dir)
}

// giveBack returns the volumes that an interrupted demo still has.
func (w *world) giveBack() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	var errs []error
	for _, v := range w.volumes {
		if v.id == "" {
			continue
		}
		for _, step := range []func(context.Context) (string, error){v.unpublish, v.unstage, v.remove} {
			_, err := step(ctx)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// startServices starts the driver and the daemon and waits until both listen.
func (w *world) startServices(ctx context.Context) (string, error) {
	csi, err := w.start("crust-csi", nil, "crust-csi", "--endpoint", "unix://"+w.path("csi.sock"), "--node-id", "demo", "--pool", w.path("pool"))
	if err != nil {
		return "", err
	}
	daemon, err := w.start("crustd", nil, "crustd", "--endpoint", "unix://"+w.path("crustd.sock"), "--driver-endpoint", "unix://"+w.path("csi.sock"),
		"--runtime-endpoint", "unix://"+w.path("runtime.sock"), "--state-dir", w.path("state"))
	if err != nil {
		return "", err
	}
	w.services = len(w.processes)
	for socket, p := range map[string]*process{"csi.sock": csi, "crustd.sock": daemon} {
		if err := waitForSocket(ctx, w.path(socket), p); err != nil {
			return "", err
		}
	}
	w.conn, err = rpc.Dial(w.path("crustd.sock"))
	return "client -> crustd -> crust-csi", err
}

func waitForSocket(ctx context.Context, path string, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended at once: %w; see %s", p.name, p.err, p.log.Name())
		case <-ctx.Done():
			return fmt.Errorf("%s does not listen: %w; see %s", p.name, ctx.Err(), p.log.Name())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
