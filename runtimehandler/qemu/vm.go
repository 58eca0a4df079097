package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu/qmp"
)

const (
	// qmpTimeout bounds a QMP command, and how long QEMU may take to greet.
	qmpTimeout = 15 * time.Second
	// bootTimeout bounds a start whose ctx has no deadline.
	bootTimeout = 2 * time.Minute
)

// VM is a running microVM. Its methods may be called from anywhere at any time.
type VM struct {
	config  Config
	args    []string
	process *hypervisor
	console *consoleLog
	monitor *qmp.Client
	client  *ttrpc.Client
	agent   guestv1.TTRPCAgentService
	conns   []net.Conn // ours of the socket pairs that nothing else owns
	copying sync.WaitGroup
	ended   chan struct{} // closed when everything of the VM is gone

	mu    sync.Mutex
	disks map[string]*disk // by serial
	ports [MaxDisks]bool   // in use
	last  int              // number of the last disk
}

// Start starts a VM and returns when its agent answers. When it fails, nothing is left but the console's log, of which the
// error has the end. ctx bounds the start only.
func Start(ctx context.Context, c Config) (*VM, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	vm := &VM{config: c, disks: map[string]*disk{}, ended: make(chan struct{})}
	cid, err := vm.launch()
	if err != nil {
		return nil, fmt.Errorf("vm: %w", err)
	}
	if err := vm.connect(ctx, cid); err != nil {
		vm.Kill()
		return nil, fmt.Errorf("vm: %w", vm.explain(err))
	}
	return vm, nil
}

// launch starts QEMU with our lines to it.
func (vm *VM) launch() (cid uint32, err error) {
	if vm.console, err = openConsole(vm.config.Dir); err != nil {
		return 0, err
	}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
		if err != nil {
			vm.closeConns()
			vm.console.close()
		}
	}()
	const firstFD = 3
	line := func(name string) (conn *net.UnixConn, fd int) {
		if err == nil {
			var file *os.File
			if conn, file, err = socketPair(name); err == nil {
				vm.conns, theirs = append(vm.conns, conn), append(theirs, file)
			}
		}
		return conn, firstFD + len(theirs) - 1
	}
	var fds descriptors
	var consoleConn, monitorConn *net.UnixConn
	consoleConn, fds.console = line("console")
	monitorConn, fds.qmp = line("qmp")
	_, fds.agent = line("agent")
	if err != nil {
		return 0, err
	}
	if !vm.config.NoVsock {
		var vhost *os.File
		if vhost, fds.vsockCID, err = openVsock(); err != nil {
			return 0, err
		}
		if vhost != nil {
			theirs = append(theirs, vhost)
			fds.vsock = firstFD + len(theirs) - 1
		}
	}
	vm.args = commandLine(vm.config, fds)
	if vm.process, err = startProcess(vm.config.Binary, vm.args, theirs); err != nil {
		return 0, err
	}
	vm.copying.Go(func() { vm.console.copyFrom(consoleConn) })
	vm.monitor = qmp.New(monitorConn, vm.onEvent)
	go vm.reap()
	return fds.vsockCID, nil
}

// reap cleans up when QEMU has ended.
func (vm *VM) reap() {
	<-vm.process.done
	_ = vm.monitor.Close()
	vm.closeConns()
	vm.copying.Wait()
	vm.console.close()
	vm.closeDisks()
	close(vm.ended)
}

func (vm *VM) closeConns() {
	for _, conn := range vm.conns {
		_ = conn.Close()
	}
}

// connect waits for QEMU and then for the agent.
func (vm *VM) connect(ctx context.Context, cid uint32) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-vm.process.done:
			cancel(errEnded)
		case <-stop:
		}
	}()
	qmpCtx, cancelQMP := context.WithTimeout(ctx, qmpTimeout)
	defer cancelQMP()
	if err := vm.monitor.Negotiate(qmpCtx); err != nil {
		return err
	}
	const agentLine = 2 // the third socket pair
	conn := vm.conns[agentLine]
	if cid != 0 {
		var err error
		if conn, err = dialVsock(ctx, cid); err != nil {
			return err
		}
	}
	vm.client = rpc.NewTTRPCClient(conn)
	vm.agent = guestv1.NewTTRPCAgentClient(vm.client)
	if _, err := vm.agent.GetInfo(ctx, &guestv1.GetInfoRequest{}); err != nil {
		return fmt.Errorf("the agent in the guest does not answer: %w: %w", rpc.FromWire(err), errdefs.ErrUnavailable)
	}
	return nil
}

var errEnded = errors.New("QEMU has ended")

// explain adds to an error what QEMU and the guest have said.
func (vm *VM) explain(err error) error {
	if text := vm.process.stderr.String(); text != "" {
		err = fmt.Errorf("%w; QEMU says: %s", err, text)
	}
	if text := vm.console.last(); text != "" {
		err = fmt.Errorf("%w; the console ends with: %s", err, text)
	}
	return err
}

// onEvent logs what QEMU says of its own accord, if an operator can act on it.
func (vm *VM) onEvent(e qmp.Event) {
	switch e.Name {
	case "BLOCK_IO_ERROR":
		vm.config.Log.Warn("a disk of a sandbox has an I/O error", "disk", e.Field("device"), "node", e.Field("node-name"),
			"operation", e.Field("operation"), "reason", e.Field("reason"))
	case "GUEST_PANICKED":
		vm.config.Log.Warn("the kernel of a sandbox has panicked")
	}
}

// Agent returns the agent in the guest. Every call needs a deadline, and the error of one is a peer's: it has to go
// through [rpc.FromWire]. ErrUnavailable once the VM has ended.
func (vm *VM) Agent() guestv1.TTRPCAgentService { return vm.agent }

// PID is QEMU's process id; it is the process that has the disks open.
func (vm *VM) PID() int { return vm.process.cmd.Process.Pid }

// CommandLine is how QEMU was started, its name first.
func (vm *VM) CommandLine() []string { return append([]string{vm.config.Binary}, vm.args...) }

// Console returns the end of what the guest wrote to its console, for a person.
func (vm *VM) Console() string { return vm.console.last() }

// Done is closed when the VM has ended and nothing of it is left.
func (vm *VM) Done() <-chan struct{} { return vm.ended }

// Wait waits until the VM has ended, and says how: nil if QEMU did so without complaint.
func (vm *VM) Wait(ctx context.Context) error {
	select {
	case <-vm.ended:
		return vm.process.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
