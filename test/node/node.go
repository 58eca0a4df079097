package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"crust.dev/crust/protocol/rpc"
)

// stopTimeout is how long a process may take to end before it is killed.
const stopTimeout = 30 * time.Second

// Node is the driver, the daemon and sandboxes.
type Node struct {
	// Dir has everything: sockets, logs, the pool, the kubelet's directory.
	Dir string
	// DriverArgs and DaemonArgs are further arguments of crust-csi and crustd.
	DriverArgs, DaemonArgs []string
	// Image is the directory of the guest's image; BuildImage makes it.
	Image string
	// Accel is what sandboxes run with: kvm, tcg, or auto for what a probe finds.
	Accel string

	// Driver and Daemon are crust-csi and crustd, as they were last started.
	Driver, Daemon *Process

	bin       string
	sandboxes []*Sandbox
	volumes   []*Volume // that may have to be given back
	conn      *grpc.ClientConn
}

// Process is one that was started, in a process group of its own so that a Ctrl-C does not reach it past us.
type Process struct {
	name string
	cmd  *exec.Cmd
	log  *os.File
	done chan struct{}
	err  error
}

// New makes a node in a new directory in dir, whose filesystem must allow direct I/O. bin has the commands.
func New(bin, dir string) (*Node, error) {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return nil, err
	}
	n := &Node{bin: bin, Accel: "auto"}
	if n.Dir, err = os.MkdirTemp(dir, "crust-node-"); err != nil {
		return nil, err
	}
	n.Image = n.Path("image")
	for _, sub := range []string{"logs", "pool", "staging", "pods"} {
		if err := os.Mkdir(n.Path(sub), 0o750); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// Path is one within the node's directory.
func (n *Node) Path(elem ...string) string {
	return filepath.Join(append([]string{n.Dir}, elem...)...)
}

// start starts a process with its output in a log. stdout may be nil.
func (n *Node) start(name string, stdout *os.File, command string, args ...string) (*Process, error) {
	log, err := os.OpenFile(n.Path("logs", name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	p := &Process{name: name, log: log, done: make(chan struct{}), cmd: exec.Command(filepath.Join(n.bin, command), args...)}
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
	return p, nil
}

// PID is its process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Kill kills it and waits for its end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Log is what it has printed.
func (p *Process) Log() string {
	raw, err := os.ReadFile(p.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// stop asks a process to end, and waits for it.
func (p *Process) stop() error {
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

func (p *Process) ended() error {
	if p.err != nil {
		return fmt.Errorf("%s: %w; see %s", p.name, p.err, p.log.Name())
	}
	return nil
}

// Close stops everything: sandboxes, the youngest first, then, when their volumes were given back, the services.
func (n *Node) Close() error {
	var errs []error
	for _, s := range slices.Backward(n.sandboxes) {
		errs = append(errs, s.Process.stop())
	}
	errs = append(errs, n.giveBack())
	if n.conn != nil {
		errs = append(errs, n.conn.Close())
	}
	for _, p := range []*Process{n.Daemon, n.Driver} {
		if p != nil {
			errs = append(errs, p.stop())
		}
	}
	return errors.Join(errs...)
}

// Ended says how the services have ended.
func (n *Node) Ended() error {
	return errors.Join(n.Driver.ended(), n.Daemon.ended())
}

// giveBack returns the volumes that are still there. Without a daemon none was ever handed out.
func (n *Node) giveBack() error {
	if n.conn == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	var errs []error
	for _, v := range n.volumes {
		if v.ID == "" {
			continue
		}
		for _, step := range []func(context.Context) error{v.Unpublish, v.Unstage, v.Delete} {
			errs = append(errs, step(ctx))
		}
	}
	return errors.Join(errs...)
}

// StartServices starts the driver and the daemon and connects to the daemon.
func (n *Node) StartServices(ctx context.Context) error {
	if err := errors.Join(n.StartDriver(ctx), n.StartDaemon(ctx)); err != nil {
		return err
	}
	var err error
	n.conn, err = rpc.Dial(n.Path("crustd.sock"))
	return err
}

// StartDriver starts crust-csi and waits until it listens.
func (n *Node) StartDriver(ctx context.Context) (err error) {
	if n.Driver, err = n.start("crust-csi", nil, "crust-csi", append([]string{
		"--endpoint", "unix://" + n.Path("csi.sock"), "--node-id", "node1", "--pool", n.Path("pool"),
	}, n.DriverArgs...)...); err != nil {
		return err
	}
	return waitForSocket(ctx, n.Path("csi.sock"), n.Driver)
}

// StartDaemon starts crustd and waits until it listens.
func (n *Node) StartDaemon(ctx context.Context) (err error) {
	if n.Daemon, err = n.start("crustd", nil, "crustd", append([]string{
		"--endpoint", "unix://" + n.Path("crustd.sock"), "--driver-endpoint", "unix://" + n.Path("csi.sock"),
		"--runtime-endpoint", "unix://" + n.Path("runtime.sock"), "--state-dir", n.Path("state"),
	}, n.DaemonArgs...)...); err != nil {
		return err
	}
	return waitForSocket(ctx, n.Path("crustd.sock"), n.Daemon)
}

func waitForSocket(ctx context.Context, path string, p *Process) error {
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
